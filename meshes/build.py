"""From a `MeshShape` to a jax mesh with explicit axes."""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType

from meshes.axes import AXES
from meshes.placement import arrange_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Number of devices along every axis of `meshes.AXES`."""

    stage: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self):
        for axis, size in zip(AXES, self.sizes):
            if size < 1:
                raise ValueError(f"MeshShape.{axis}={size} must be at least 1")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes in the order of `meshes.AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)


def build_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Explicit-axes mesh over `devices` (default: all of `jax.devices()`); use `jax.set_mesh`.

    Raises:
        ValueError: the sizes do not multiply to the number of devices, or do not fit its slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if shape.num_devices != len(devices):
        raise ValueError(
            f"{shape} needs {shape.num_devices} devices, but {len(devices)} were given; "
            "change an axis size or pass devices="
        )
    types = (AxisType.Explicit,) * len(AXES)
    return jax.sharding.Mesh(arrange_devices(shape.sizes, devices), AXES, axis_types=types)


def abstract_mesh(shape: MeshShape) -> jax.sharding.AbstractMesh:
    """The same mesh without devices, for lowering programs for machines that are not here."""
    types = (AxisType.Explicit,) * len(AXES)
    return jax.sharding.AbstractMesh(shape.sizes, AXES, axis_types=types)
