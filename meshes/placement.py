"""Which device stands where in a mesh.

Tensor, context and expert exchange most, so they get neighbours: the innermost axes stay inside a
node or a slice, and stage and data, which exchange least, go across.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from meshes.axes import AXES, DATA, FSDP, STAGE

# Axes that may be cut by slices of a torus, the first first: over the slow network they move
# activations of a stage once, gradients once, or parameters.
ACROSS = (STAGE, DATA, FSDP)


def arrange_devices(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices in the order of a mesh with these axis sizes (in the order of `meshes.AXES`).

    On a torus every axis gets whole dimensions where its size allows, several slices lie along
    `ACROSS`. Elsewhere devices keep their order, which is that of the nodes, so that the innermost
    axes are neighbours.

    Raises:
        ValueError: several slices that do not fit `ACROSS`.
    """
    if devices[0].platform != "tpu":
        return np.array(devices, dtype=object).reshape(sizes)
    slices = len({getattr(device, "slice_index", None) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    outer = slice_counts(sizes, slices)
    return mesh_utils.create_hybrid_device_mesh(
        tuple(size // outer[axis] for axis, size in zip(AXES, sizes)),
        tuple(outer.values()),
        devices,
        allow_split_physical_axes=True,
    )


def slice_counts(sizes: Sequence[int], slices: int) -> dict[str, int]:
    """How many of the slices lie along each axis.

    Raises:
        ValueError: the axes that may be cut have no such factor.
    """
    by_axis = dict(zip(AXES, sizes))
    counts, left = dict.fromkeys(AXES, 1), slices
    for axis in ACROSS:
        counts[axis] = math.gcd(by_axis[axis], left)
        left //= counts[axis]
    if left > 1:
        found = math.prod(by_axis[axis] for axis in ACROSS)
        raise ValueError(
            f"{slices} slices do not fit mesh axes {by_axis}: {' x '.join(ACROSS)} = {found} must "
            f"be a multiple of {slices}, because the other axes stay inside a slice; use "
            f"MeshShape({DATA}={slices}, ...)"
        )
    return counts
