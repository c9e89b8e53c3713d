"""Which process of how many this is, and where the first one listens.

Read from the environment that Slurm, Open MPI and TPU pods (GKE) give every process, or given.
"""

import dataclasses
import os
import re
from collections.abc import Mapping

# In the range that no service claims; jobs on one machine should not meet.
FIRST_PORT, NUM_PORTS = 61440, 4096
TPU_PORT = 8482
AUTOMATIC = "auto"  # as coordinator: jax asks the machine's metadata


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """One process's place in a job of many.

    Attributes:
        coordinator: "host:port" of process 0, or None when jax finds it by itself.
        num_processes: how many there are; None as above.
        process_id: number of this one; None as above.
        local_device: the only device of its host that this process uses; None: all of them.
        source: where the values come from, for messages.
    """

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    local_device: int | None = None
    source: str = "options"


def find_cluster(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Cluster:
    """The place of this process; what is given wins over what the launcher says.

    Raises:
        ValueError: nothing is known of a value, or the values contradict each other.
    """
    environment = os.environ if environment is None else environment
    if coordinator == AUTOMATIC:
        return Cluster(
            coordinator=None, num_processes=None, process_id=None, source="the machine's metadata"
        )
    given = (coordinator, num_processes, process_id)
    found = next((f for read in _READERS if (f := read(environment)) is not None), None)
    if found is None:
        found = Cluster(coordinator=None, num_processes=None, process_id=None)
    values = {
        name: value if value is not None else getattr(found, name)
        for name, value in zip(("coordinator", "num_processes", "process_id"), given)
    }
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} unknown: no Slurm step, Open MPI or TPU pod environment says "
            "so; give the address HOST:PORT of process 0 as the coordinator, the number of "
            f"processes, and each its own process id; {AUTOMATIC!r} as the coordinator lets a "
            "Google Cloud TPU VM ask its metadata"
        )
    result = dataclasses.replace(
        found, **values, source="options" if None not in given else found.source
    )
    _check(result)
    return result


def _check(cluster: Cluster) -> None:
    host, _, port = str(cluster.coordinator).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"coordinator={cluster.coordinator!r} is not HOST:PORT; name the host of process 0 "
            f"and a free port, for example node0:{FIRST_PORT}"
        )
    if cluster.num_processes < 1:
        raise ValueError(f"num_processes={cluster.num_processes} must be at least 1")
    if not 0 <= cluster.process_id < cluster.num_processes:
        raise ValueError(
            f"process_id={cluster.process_id} must be in 0..{cluster.num_processes - 1} "
            f"(num_processes={cluster.num_processes}, from {cluster.source})"
        )


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
    if not all(name in environment for name in names):
        return None
    job, nodes, count, rank = (environment[name] for name in names)
    # SLURM_STEP_TASKS_PER_NODE looks like "8(x4)" or "4,2".
    per_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    alone = per_node is None or int(per_node.group()) == 1
    return Cluster(
        coordinator=f"{first_host(nodes)}:{FIRST_PORT + int(job) % NUM_PORTS}",
        num_processes=int(count),
        process_id=int(rank),
        local_device=None if alone else int(environment["SLURM_LOCALID"]),
        source="Slurm",
    )


def first_host(nodes: str) -> str:
    """First name of a Slurm list: "node[007-012,20],other" -> "node007"."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.partition(",")[0]
    number = re.match(r"\w+", rest)
    # A suffix may follow the bracket: rack[1-2]-a.
    suffix = re.match(r"[^,\[]*", rest.partition("]")[2])
    return prefix + (number.group() if number else "") + (suffix.group() if suffix else "")


def _open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment or "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    # The launcher's own address: "12345.0;tcp://10.0.0.1,10.1.0.1:4567", mpirun on node 0.
    address = None
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    host = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    if host is not None:
        job = int(re.match(r"\d*", uri).group() or 0) >> 12
        address = f"{host.group(1) or f'[{host.group(2)}]'}:{FIRST_PORT + job % NUM_PORTS}"
    alone = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") == "1"
    return Cluster(
        coordinator=address,
        num_processes=int(environment["OMPI_COMM_WORLD_SIZE"]),
        process_id=int(environment["OMPI_COMM_WORLD_RANK"]),
        local_device=None if alone else int(environment.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")),
        source="Open MPI",
    )


def _tpu_pod(environment: Mapping[str, str]) -> Cluster | None:
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if not hosts or "TPU_WORKER_ID" not in environment:
        return None
    workers = hosts.split(",")
    slices = int(environment.get("MEGASCALE_NUM_SLICES") or 1)
    number = int(environment.get("MEGASCALE_SLICE_ID") or 0)
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS") or workers[0]
    return Cluster(
        coordinator=f"{first.split(':')[0]}:{TPU_PORT}",
        num_processes=len(workers) * slices,
        process_id=number * len(workers) + int(environment["TPU_WORKER_ID"]),
        source="the TPU pod",
    )


_READERS = (_slurm, _open_mpi, _tpu_pod)
