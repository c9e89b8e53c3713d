"""Do devices that should hold the same array hold the same bits?

Every device sums its own copy into one number; nothing large moves.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshes.axes import AXES, axes_of
from meshes.shard import per_device, spec_of

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def device_digests(arrays: Sequence[jax.Array]) -> jax.Array:
    """A digest of each device's piece of each array, uint32 [*mesh axes, A], for `jax.jit`.

    Digests of pieces differ when a single bit does; equal ones may hide two differences that
    cancel. The result is complete on every device.
    """

    def local(*pieces):
        digests = jnp.stack([_digest(piece) for piece in pieces])
        return digests.reshape(*(1,) * len(AXES), -1)

    mapped = per_device(local, tuple(spec_of(a) for a in arrays), PartitionSpec(*AXES, None))
    return jax.sharding.reshard(mapped(*arrays), PartitionSpec())


def _digest(x: jax.Array) -> jax.Array:
    """[] uint32: each word times an odd number of its place, summed."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
    words = x.reshape(-1).astype(jnp.uint32)
    place = jax.lax.iota(jnp.uint32, words.size)
    return jnp.sum(words * (place * jnp.uint32(2654435761) | jnp.uint32(1)), dtype=jnp.uint32)


def disagreements(
    digests: np.ndarray, specs: Sequence[PartitionSpec], mesh: jax.sharding.Mesh
) -> dict[int, list[jax.Device]]:
    """Which arrays have copies that differ, and on which devices.

    Args:
        digests: from `device_digests`.
        specs: how each array lies on the mesh.
        mesh: the mesh.

    Returns:
        Number of the array -> devices whose copy is not that of most.
    """
    result = {}
    for number, spec in enumerate(specs):
        cut = {axis for entry in spec for axis in axes_of(entry)}
        copies = tuple(i for i, axis in enumerate(AXES) if axis not in cut)
        values = np.moveaxis(digests[..., number], copies, range(len(copies)))
        devices = np.moveaxis(mesh.devices, copies, range(len(copies)))
        count = int(np.prod(values.shape[: len(copies)]))
        values, devices = values.reshape(count, -1), devices.reshape(count, -1)
        if (values == values[:1]).all():
            continue
        odd = []
        for piece, owners in zip(values.T, devices.T):
            found, counts = np.unique(piece, return_counts=True)
            usual = found[counts.argmax()]
            odd += [device for device, value in zip(owners, piece) if value != usual]
        result[number] = odd
    return result
