"""Where a batch enters a pipeline and leaves it again.

Outside of the pipeline the stage axis may split the rows of the batch like any other; inside, the
first stage takes whole micro-batches and the last gives them back.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshes.axes import STAGE, axes_of
from meshes.schedule import Schedule
from meshes.shard import axis_size, per_device, spec_of


def rows_in_stage(x: jax.Array) -> int:
    """Rows of `x` [B, ...] that one device computes in the pipeline, all micro-batches together."""
    axes = axes_of(spec_of(x)[0])
    return x.shape[0] // math.prod(axis_size(axis) for axis in axes if axis != STAGE)


def divisors(rows: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
    return sorted({*small, *(rows // n for n in small)})


def enter(x: jax.Array, micro_batches: int, dimension: int = 0) -> jax.Array:
    """Rows of a dimension -> [stages, micro-batches, ...], the same at every stage.

    Rows that lie on the stage axis are gathered over it; the gradient is what all stages send back,
    that is the first one.
    """
    spec = spec_of(x)
    rows, is_cut = _rows_of(spec[dimension])

    def run(x):
        if is_cut:
            x = jax.lax.all_gather(x, STAGE, axis=dimension, tiled=True)
        x = jnp.moveaxis(x, dimension, 0)
        x = x.reshape(micro_batches, x.shape[0] // micro_batches, *x.shape[1:])
        return jnp.moveaxis(x, 1, dimension + 1)[None]

    rest = list(spec)
    rest[dimension] = rows
    return per_device(run, (spec,), P(STAGE, None, *rest))(x)


def leave(ends: jax.Array, spec: P) -> jax.Array:
    """[stages, micro-batches, b, ...] of which the last stage has the results -> [B, ...]."""
    _, is_cut = _rows_of(spec[0])

    def run(x):
        x = x[0].reshape(x.shape[1] * x.shape[2], *x.shape[3:])
        return _from_last(x, is_cut, 0)

    return per_device(run, (spec_of(ends),), spec)(ends)


def leave_bank(cache: jax.Array, spec: P, schedule: Schedule) -> jax.Array:
    """[stages, micro-batches, N, b, ...] -> [N, B, ...]: what the last stage has cached.

    Entries that every stage has are taken from its own cache where its rows are.
    """
    _, is_cut = _rows_of(spec[1])
    known = schedule.known_entries

    def run(x):
        x = jnp.moveaxis(x[0], 1, 0)  # [N, M, b, ...]
        x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
        old, new = x[:known], x[known:]
        if is_cut:
            size = x.shape[1] // schedule.stages
            start = jax.lax.axis_index(STAGE) * size
            old = jax.lax.dynamic_slice_in_dim(old, start, size, 1)
        else:
            old = _from_last(old, is_cut, 1)
        return jnp.concatenate([old, _from_last(new, is_cut, 1)])

    return per_device(run, (spec_of(cache),), spec)(cache)


def _from_last(x: jax.Array, is_cut: bool, dimension: int) -> jax.Array:
    """The last stage's rows: each stage its share of them, or all."""
    is_last = jax.lax.axis_index(STAGE) == axis_size(STAGE) - 1
    x = jnp.where(is_last, x, 0)
    if is_cut:
        return jax.lax.psum_scatter(x, STAGE, scatter_dimension=dimension, tiled=True)
    return jax.lax.psum(x, STAGE)


def _rows_of(entry) -> tuple[tuple[str, ...] | None, bool]:
    """Axes of the batch rows without that of stages, and whether it was among them."""
    axes = axes_of(entry)
    rows = tuple(axis for axis in axes if axis != STAGE)
    return rows or None, STAGE in axes
