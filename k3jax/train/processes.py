"""What the processes of a distributed run settle among themselves before and between steps."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
from rich.console import Console

from k3jax.errors import UserError
from k3jax.train.config import TrainConfig, to_dict
from k3jax.train.identity import flat_entries
from k3jax.train.machines import ClusterConfig
from k3jax.train.run_directory import versions
from k3jax.train.supervisor import MISSED, Report, is_worker, report_alone
from k3jax.train.watch import own_address
from meshes import distributed
from meshes.clusters import find_cluster

# A process that must stop says so; the others learn it while at most this many steps later begin.
STEPS_AHEAD = 2
# Settings of the compilers, which change programs.
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
LONG_SECONDS = 3600  # the others wait so long while the lead writes what is written once
# Where parents watch, jax's own beats are left for workers that are frozen, not dead: it takes a
# live one for dead when one beat is late by half the timeout, as beside compilation they can be.
FROZEN_SECONDS = 100


class NotMet(UserError):
    """Processes did not come to where all meet, in time."""

    exit_code = MISSED


def connect(config: ClusterConfig, report: Report) -> None:
    """Join the other processes.

    Raises:
        UserError: the place of this process is unknown, or not the same to all.
        NotMet: the others do not come.
    """
    heartbeat = config.heartbeat_seconds
    try:
        cluster = find_cluster(config.coordinator, config.num_processes, config.process_id)
    except ValueError as error:
        raise UserError(
            f"--distributed: {error}. The options are --cluster.coordinator, "
            "--cluster.num-processes and --cluster.process-id"
        ) from error
    with _explained("--distributed: "):
        distributed.start(
            cluster,
            heartbeat_seconds=max(heartbeat, FROZEN_SECONDS) if is_worker() else heartbeat,
            start_seconds=config.start_seconds,
        )
        address = own_address(distributed.lead_host())
        watch = distributed.from_lead("watch", address, seconds=config.start_seconds)
    report.update(
        process=distributed.process_id(),
        processes=distributed.num_processes(),
        heartbeat_seconds=heartbeat,
        watch=watch,
    )


class Together:
    """A jitted function that all processes have compiled before any of them runs it.

    Collectives wait for half a minute only where devices are CPUs, and compilers are not equally
    quick. Without other processes it is the function itself.

    Args:
        name: of the function.
        function: from `jax.jit`; all processes call it alike.
    """

    def __init__(self, name: str, function: Callable):
        self._name, self._function = name, function
        self._compiled: dict = {}  # by shapes and types of the arguments

    def __call__(self, *arguments, **named):
        if not distributed.is_distributed():
            return self._function(*arguments, **named)
        leaves, structure = jax.tree.flatten((arguments, named))
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._compiled:
            self._compiled[key] = self._function.lower(*arguments, **named).compile()
            meeting = f"compiled/{self._name}/{len(self._compiled)}"
            with _explained():
                distributed.wait_for_all(meeting, seconds=LONG_SECONDS)
        return self._compiled[key](*arguments, **named)


def lead_console(console: Console) -> Console:
    """The console in the process that writes what is written once; one that is silent elsewhere."""
    return console if distributed.is_lead_process() else Console(file=open(os.devnull, "w"))


def comparable_options(config: TrainConfig) -> dict:
    """Options that must be alike: all but the places of files, which may differ by host."""
    options = to_dict(config)
    del options["runs"], options["compile_cache"], options["data"]["path"]
    return options


def software() -> dict:
    """What must be alike wherever the same program is to run. Touches no device."""
    return {**versions(), "variables": {name: os.environ.get(name) for name in VARIABLES}}


def devices() -> dict:
    """The same of the devices; the first call of all processes starts them together."""
    return {"kind": jax.local_devices()[0].device_kind, "per_process": jax.local_device_count()}


def agree(name: str, table: dict, trouble: str | None = None, *, seconds: float) -> None:
    """Compare what every process is about to do with what process 0 is about to do.

    Args:
        name: of this comparison.
        table: nested dictionary of JSON values.
        trouble: why this process cannot go on, if so.
        seconds: how long to wait for the others.

    Raises:
        UserError: in all processes alike: a process cannot go on, or entries differ; it names
            them, the values and the processes.
    """
    flat = dict(flat_entries(json.loads(json.dumps(table))))
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()
    with _explained():
        # The table itself travels only to those that differ.
        distributed.publish_from_lead(f"{name}/table", flat)
        lead_digest = distributed.from_lead(f"{name}/digest", digest, seconds=seconds)
        differs = {}
        if digest != lead_digest and trouble is None:
            theirs = distributed.read_from_lead(f"{name}/table", seconds=seconds)
            differs = {
                entry: (theirs.get(entry, "nothing"), flat.get(entry, "nothing"))
                for entry in sorted(theirs.keys() | flat.keys())
                if theirs.get(entry) != flat.get(entry)
            }
        found = distributed.gather_to_lead(f"{name}/found", [trouble, differs], seconds=seconds)
        verdict = None if found is None else _verdict(found)
        verdict = distributed.from_lead(f"{name}/verdict", verdict, seconds=seconds)
    if verdict is not None:
        raise UserError(verdict)


def _verdict(found: list) -> str | None:
    """What is wrong, in words, from [trouble, differing entries] of every process."""
    troubles: dict[str, list[int]] = {}
    entries: dict[tuple, list[int]] = {}
    for process, (trouble, differs) in enumerate(found):
        if trouble is not None:
            troubles.setdefault(trouble, []).append(process)
        for name, (lead, own) in differs.items():
            entries.setdefault((name, json.dumps(lead), json.dumps(own)), []).append(process)
    if troubles:
        return "; ".join(
            text if len(who) == len(found) else f"{_named(who)}: {text}"
            for text, who in troubles.items()
        )
    if not entries:
        return None
    shown = [
        f"{name} is {own} in {_named(who)}, {lead} in process 0"
        for (name, lead, own), who in list(entries.items())[:5]
    ]
    more = f"; and {len(entries) - 5} more" if len(entries) > 5 else ""
    return (
        f"the processes differ: {'; '.join(shown)}{more}. Start all of them with the same command, "
        "files, packages and environment"
    )


def _named(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:8])) + (" ..." if len(processes) > 8 else "")
    return f"process{'es' if len(processes) > 1 else ''} {shown}"


def decided_by_lead(name: str, decide: Callable, *, seconds: float = LONG_SECONDS):
    """The JSON value that `decide` returns in process 0, or the UserError it raises, in all.

    Raises:
        UserError: process 0 raised it.
    """
    outcome = None
    if distributed.is_lead_process():
        try:
            outcome = [True, decide()]
        except UserError as error:
            outcome = [False, str(error)]
    with _explained():
        succeeded, value = distributed.from_lead(name, outcome, seconds=seconds)
    if not succeeded:
        raise UserError(value)
    return value


def check_shared_folder(path: Path, *, seconds: float) -> None:
    """All processes must see the run directory that process 0 has made.

    Raises:
        UserError: names those that do not.
    """
    with _explained():
        seen = distributed.gather_to_lead("folder", path.is_dir(), seconds=seconds)

    def verdict():
        blind = [process for process, sees in enumerate(seen) if not sees]
        if blind:
            raise UserError(
                f"{path} is not there for {_named(blind)}: --runs must be a folder that all hosts "
                "share"
            )

    decided_by_lead("folder/verdict", verdict, seconds=seconds)


@contextlib.contextmanager
def _explained(prefix: str = ""):
    try:
        yield
    except distributed.ProcessesDiffer as error:
        raise UserError(f"{prefix}{error}") from error
    except distributed.DistributedError as error:
        raise NotMet(f"{prefix}{error}") from error


class StopAgreement:
    """Lets all processes stop after the same step when one of them is asked to.

    A step ends nowhere before it has begun everywhere. So what process 0 announces before it
    begins step n is known everywhere before step n + 2 begins.
    """

    def __init__(self):
        self._asked = False
        self._at: int | None = None
        self._signum: int | None = None

    def before_step(self, number: int, signum: int | None) -> None:
        """Say that this process was asked to stop, if so, and hear of others."""
        if not distributed.is_distributed():
            return
        if signum is not None and not self._asked:
            self._asked = True
            distributed.post(f"stop/asked/{distributed.process_id()}", signum)
        if self._at is None and distributed.is_lead_process():
            asked = distributed.look_below("stop/asked")
            if asked:
                distributed.post("stop/at", [number + STEPS_AHEAD, min(asked.values())])
        if self._at is None:
            self._at, self._signum = distributed.look("stop/at") or (None, None)

    def after_step(self, number: int, signum: int | None) -> int | None:
        """The signal to stop for, when this is the step to stop after."""
        if not distributed.is_distributed():
            return signum
        return self._signum if number == self._at else None


def leave(code: int) -> None:
    """End this process of a distributed run, in step with the others where they are alive.

    Never returns: jax's own way out waits for minutes for processes that are not coming.
    """
    try:
        distributed.wait_for_all(f"leave/{code}", seconds=5)
        distributed.stop()
    except Exception:
        # Other ends are chosen by all; there only process 0 may still have something to write.
        if code in (2, MISSED):
            report_alone()
    os._exit(code)
