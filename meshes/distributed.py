"""Many processes as one job: start, roll call, barriers and small messages, all with a time limit.

jax ends a process inside C++ when its coordinator or a peer is missing. So processes call the
roll over plain sockets before jax starts: whoever is missing is named in an ordinary error.
"""

import contextlib
import json
import os
import socket
import time

import jax

from meshes.clusters import Cluster

_POLL_SECONDS = 0.2


# Answers of process 0 to those that call the roll.
_GO, _LATE, _WRONG = "k3jax go", "k3jax late ", "k3jax wrong "


class DistributedError(RuntimeError):
    """A process or its coordinator did not answer in time."""


class ProcessesDiffer(DistributedError):
    """The processes were told different things of how many they are, and which."""


def start(cluster: Cluster, *, heartbeat_seconds: int = 30, start_seconds: float = 120) -> None:
    """Connect this process with the others. Call before any device is touched.

    Args:
        cluster: from `meshes.find_cluster`.
        heartbeat_seconds: a process silent for so long counts as dead, and ends all others.
        start_seconds: how long to wait for the others.

    Raises:
        DistributedError: the coordinator does not answer, or processes are missing.
    """
    # The loop handles signals between steps; jax's own handler would hide them from it.
    jax.config.update("jax_enable_preemption_service", False)
    if cluster.coordinator is not None and cluster.num_processes > 1:
        call_roll(cluster, start_seconds)
    jax.distributed.initialize(
        coordinator_address=cluster.coordinator,
        num_processes=cluster.num_processes,
        process_id=cluster.process_id,
        local_device_ids=cluster.local_device,
        # None of the values is left to jax, except where it is to find all of them.
        cluster_detection_method=None if cluster.coordinator is None else "deactivate",
        initialization_timeout=max(1, round(start_seconds)),
        heartbeat_timeout_seconds=heartbeat_seconds,
    )


def call_roll(cluster: Cluster, seconds: float) -> None:
    """Wait until every process has been heard of; names those that were not.

    Raises:
        DistributedError: see `start`.
    """
    host, _, port = cluster.coordinator.rpartition(":")
    address = (host.strip("[]"), int(port))
    if cluster.process_id == 0:
        _lead_roll_call(cluster, address, seconds)
    else:
        _answer_roll_call(cluster, address, seconds)


def _lead_roll_call(cluster: Cluster, address: tuple[str, int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    present: dict[int, socket.socket] = {}
    trouble, answer = None, _GO
    try:
        listener = socket.create_server(
            ("", address[1]),
            family=socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET,
            dualstack_ipv6=socket.has_dualstack_ipv6(),
            backlog=4096,
        )
    except OSError as error:
        raise DistributedError(
            f"process 0 cannot listen on port {address[1]} ({os.strerror(error.errno)}); give "
            "another one as the coordinator's, or end what uses it"
        ) from error
    with listener:
        listener.settimeout(_POLL_SECONDS)
        while len(present) < cluster.num_processes - 1 and trouble is None:
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, cluster.num_processes)) - present.keys())
                trouble = (
                    f"{len(missing)} of {cluster.num_processes} processes did not come within "
                    f"{seconds:g} s: number {_listed(missing)}. Check that they were started with "
                    f"the coordinator {cluster.coordinator} and can reach it"
                )
                answer = _LATE + trouble
                break
            try:
                connection, peer = listener.accept()
            except TimeoutError:
                continue
            trouble = _enter(cluster, connection, peer[0].removeprefix("::ffff:"), present)
            if trouble is not None:
                answer = _WRONG + trouble
    for connection in present.values():
        with connection:
            connection.sendall(f"{answer}\n".encode())
            # Wait for the peer to close first: the port must be free for jax at once.
            connection.settimeout(5)
            with contextlib.suppress(OSError):
                connection.recv(1)
    if trouble is not None:
        raise (ProcessesDiffer if answer.startswith(_WRONG) else DistributedError)(trouble)


def _enter(cluster: Cluster, connection, host: str, present: dict) -> str | None:
    """Note one caller; what is wrong with it, if anything. Strangers are sent away."""
    connection.settimeout(5)
    try:
        word, rank, count = connection.makefile().readline().split()
        rank, count = int(rank), int(count)
        if word != "k3jax":
            raise ValueError
    except (ValueError, OSError):
        connection.close()
        return None
    twice = rank in present or rank == 0
    previous, present[rank] = present.get(rank), connection
    if previous is not None:
        previous.close()
    if count != cluster.num_processes:
        return (
            f"process {rank} at {host} was told of {count} processes, process 0 of "
            f"{cluster.num_processes}; give all the same number"
        )
    if twice or not 0 < rank < count:
        return f"two processes say that they are number {rank} (one at {host}); number them"
    return None


def _answer_roll_call(cluster: Cluster, address: tuple[str, int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    where = f"the coordinator {cluster.coordinator} (process 0)"
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(_POLL_SECONDS, 2))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"{where} did not answer within {seconds:g} s ({error}). Check that process 0 "
                    "runs on that host, that the port is open between the hosts, and that the "
                    "address is one the other hosts can reach"
                ) from error
            time.sleep(_POLL_SECONDS)
    with connection:
        # Process 0 itself waits for all: it answers at its own limit.
        connection.settimeout(max(_POLL_SECONDS, deadline - time.monotonic()) + 5)
        try:
            connection.sendall(f"k3jax {cluster.process_id} {cluster.num_processes}\n".encode())
            answer = connection.makefile(errors="replace").readline().strip()
        except OSError as error:
            raise DistributedError(
                f"{where} took the connection of process {cluster.process_id} but did not answer "
                f"within {seconds:g} s; is another program listening on that port?"
            ) from error
    if not answer:
        raise DistributedError(f"{where} closed the connection; see what it printed")
    if answer.startswith(_WRONG):
        raise ProcessesDiffer(answer.removeprefix(_WRONG))
    if answer.startswith(_LATE):
        raise DistributedError(answer.removeprefix(_LATE))
    if answer != _GO:
        raise DistributedError(
            f"another program answers at {where}: {answer[:60]!r}; give a port that is free on the "
            "host of process 0"
        )


def stop() -> None:
    """Take leave of the others; all processes call this."""
    jax.distributed.shutdown()


def is_distributed() -> bool:
    """Whether `start` has connected this process with others."""
    return jax.distributed.is_initialized() and num_processes() > 1


def process_id() -> int:
    """Number of this process; 0 where there is no other. Touches no device."""
    return _state().process_id or 0


def num_processes() -> int:
    """How many processes there are. Touches no device."""
    return _state().num_processes or 1


def lead_host() -> str:
    """Name or address of the host of process 0, as the others reach it. Touches no device."""
    return (_state().coordinator_address or "").rpartition(":")[0].strip("[]")


def is_lead_process() -> bool:
    """Whether this process writes what is written once; true where there is no other."""
    return process_id() == 0


def gather_to_lead(name: str, value, *, seconds: float = 120) -> list | None:
    """In process 0 the `value` (JSON) of every process, in order; None in others.

    A name can be used once.

    Raises:
        DistributedError: processes that did not come within `seconds` are named.
    """
    if not is_distributed():
        return [value]
    post(f"{name}/{process_id()}", value)
    wait_for_all(name, seconds=seconds)
    if not is_lead_process():
        return None
    found = look_below(name)
    return [found[str(number)] for number in range(num_processes())]


def from_lead(name: str, value, *, seconds: float = 120):
    """The `value` (JSON) that process 0 passes; others' are ignored. A name can be used once.

    Raises:
        DistributedError: process 0 did not come within `seconds`.
    """
    publish_from_lead(name, value)
    return value if is_lead_process() else read_from_lead(name, seconds=seconds)


def publish_from_lead(name: str, value) -> None:
    """Leave a JSON value for `read_from_lead`, if this is process 0."""
    if is_distributed() and is_lead_process():
        post(name, value)


def read_from_lead(name: str, *, seconds: float = 120):
    """What process 0 has published, or will within `seconds`.

    Raises:
        DistributedError: it did not.
    """
    try:
        return json.loads(_client().blocking_key_value_get(name, int(1000 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(
            f"process 0 did not come to {name!r} within {seconds:g} s"
        ) from error


def post(name: str, value) -> None:
    """Leave a JSON value for the others under a new name."""
    _client().key_value_set(name, json.dumps(value))


def look(name: str):
    """What was posted under a name; None when nothing was."""
    try:
        return json.loads(_client().key_value_try_get(name))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def look_below(name: str) -> dict:
    """What was posted under names that begin with `name` and a slash, by the rest of its name."""
    found = _client().key_value_dir_get(name + "/")
    return {key.rpartition("/")[2]: json.loads(text) for key, text in found}


def wait_for_all(name: str, *, seconds: float = 120) -> None:
    """A barrier; a name can be used once.

    Raises:
        DistributedError: processes that did not come within `seconds` are named.
    """
    if not is_distributed():
        return
    post(f"barrier/{name}/{process_id()}", 1)
    try:
        _client().wait_at_barrier(name, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        came = {int(number) for number in look_below(f"barrier/{name}")}
        missing = sorted(set(range(num_processes())) - came)
        raise DistributedError(
            f"{len(missing)} of {num_processes()} processes did not come to {name!r} within "
            f"{seconds:g} s: {_listed(missing)}"
        ) from error


def _state():
    # jax has no public name for the messages of its coordination service, and its public counts
    # start the devices.
    from jax._src import distributed

    return distributed.global_state


def _client():
    return _state().client


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:16]))
    return shown + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
