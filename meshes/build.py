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
            if type(size) is not int or size < 1:
                raise ValueError(f"MeshShape.{axis}={size!r} must be a whole number, at least 1")

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


# Chip -> its kind as jax names it, cores of one device, platform.
_DEVICES = {
    "v5e": ("TPU v5 lite", 1, "tpu"),
    "v5p": ("TPU v5", 1, "tpu"),
    "v6e": ("TPU v6 lite", 1, "tpu"),
    "tpu7x": ("TPU7x", 1, "tpu"),
    "h200": ("NVIDIA H200", None, "cuda"),
}


def abstract_mesh(shape: MeshShape, chip: str | None = None) -> jax.sharding.AbstractMesh:
    """The same mesh without devices, for lowering programs for machines that are not here.

    Args:
        shape: axis sizes.
        chip: what the devices are ("v5p", "h200"): programs get its kernels and transports. None:
            the default device.

    Raises:
        ValueError: an unknown chip.
    """
    types, device = (AxisType.Explicit,) * len(AXES), None
    if chip is not None:
        if chip not in _DEVICES:
            raise ValueError(f"abstract_mesh: chip {chip!r} is unknown; use one of {[*_DEVICES]}")
        device = jax.sharding.AbstractDevice(*_DEVICES[chip])
    return jax.sharding.AbstractMesh(shape.sizes, AXES, axis_types=types, abstract_device=device)
