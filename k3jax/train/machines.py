"""Where a run computes: its mesh, its processes, and what is checked between them."""

import dataclasses
import math

from k3jax.errors import UserError
from meshes import MeshShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis of the mesh; their product is all devices of all processes."""

    stage: int = 1
    """Pipeline stages (and rows of the batch, outside of the pipeline)."""
    data: int = 1
    """Replicas of everything, each with its own rows."""
    fsdp: int = 1
    """Rows of the batch, with parameters and optimizer state stored in pieces."""
    expert: int = 1
    """Routed experts (and rows of the batch)."""
    context: int = 1
    """Tokens of a row."""
    tensor: int = 1
    """Heads, hidden widths and the vocabulary."""

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            if type(size) is not int or size < 1:
                raise UserError(f"mesh.{name}={size!r} must be a whole number, at least 1")

    @property
    def num_devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(dataclasses.asdict(self).values())

    @property
    def num_row_parts(self) -> int:
        """Parts that the rows of a batch are cut into."""
        return self.stage * self.data * self.fsdp * self.expert

    def shape(self) -> MeshShape:
        """The same for `meshes`."""
        return MeshShape(**dataclasses.asdict(self))

    def options(self) -> str:
        """The command line that asks for this mesh."""
        sizes = dataclasses.asdict(self).items()
        return " ".join(f"--mesh.{name} {n}" for name, n in sizes if n > 1) or "--mesh.data 1"


def check_mesh(mesh: MeshConfig, num_devices: int, rows: int) -> None:
    """Refuse a mesh that does not fit the devices, or the batch.

    Args:
        mesh: the sizes asked for.
        num_devices: all devices of all processes.
        rows: rows that are computed at once (those of a micro-batch).

    Raises:
        UserError: both numbers, and a mesh that would work.
    """
    if mesh.num_devices != num_devices:
        raise UserError(
            f"the mesh {mesh.options()} has {mesh.num_devices} devices, but {num_devices} are "
            f"here; {fitting_mesh(mesh, num_devices, rows).options()} would fit"
        )
    if rows % mesh.num_row_parts:
        raise UserError(
            f"{rows} rows at a time (batch / micro_batches) do not divide by the "
            f"{mesh.num_row_parts} parts of --mesh.stage {mesh.stage} --mesh.data {mesh.data} "
            f"--mesh.fsdp {mesh.fsdp} --mesh.expert {mesh.expert}; a batch of a multiple of "
            f"{mesh.num_row_parts} rows per micro-batch would"
        )


def fitting_mesh(mesh: MeshConfig, num_devices: int, rows: int) -> MeshConfig:
    """The nearest mesh of `num_devices`: one axis changed if that can do, else a plain one."""
    for name in ("fsdp", "data", "expert", "context", "tensor", "stage"):
        others = mesh.num_devices // getattr(mesh, name)
        if num_devices % others == 0:
            changed = dataclasses.replace(mesh, **{name: num_devices // others})
            if rows % changed.num_row_parts == 0:
                return changed
    parts = math.gcd(num_devices, rows)
    return MeshConfig(fsdp=parts, context=num_devices // parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How the processes of a distributed run find each other.

    Slurm, Open MPI and TPU pods tell each process its place: then nothing need be given.
    """

    coordinator: str | None = None
    """HOST:PORT of process 0; `auto` lets a Google Cloud TPU VM ask its metadata."""
    num_processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Number of this one, from 0."""
    heartbeat_seconds: int = 30
    """A process silent for so long counts as dead and ends the others."""
    start_seconds: int = 120
    """How long processes wait for each other at the start, and at each meeting after it."""

    def __post_init__(self):
        for name in ("heartbeat_seconds", "start_seconds"):
            if getattr(self, name) < 1:
                raise UserError(f"cluster.{name}={getattr(self, name)} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChecksConfig:
    """What is compared between devices and processes while a run goes on."""

    replicas_every: int = 100
    """Steps between comparisons of what devices hold copies of; 0 never compares."""
    hosts_every: int = 100
    """Steps between reports of the slowest process; 0 writes none."""

    def __post_init__(self):
        for name in ("replicas_every", "hosts_every"):
            if getattr(self, name) < 0:
                raise UserError(f"checks.{name}={getattr(self, name)} must not be negative")
