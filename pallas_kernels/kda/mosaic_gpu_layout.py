"""Rows of tokens as whole chunks: padding, marks of runs, runs on chunk boundaries."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.mosaic_gpu_tiles import BLOCK, CHUNK
from pallas_kernels.kda.segments import align_runs, number_runs


class Layout(NamedTuple):
    """What the kernels need to know of runs; None where there is nothing to say."""

    # [B, 3, T] float32: number of each token's run; 1 where it continues the run that its chunk
    # starts in; 1 where it is of the run that its chunk ends in.
    marks: jax.Array | None = None
    # [B, chunks] bool: the chunk ends in another run than it starts in.
    resets: jax.Array | None = None
    # [B, 2, chunks] int32: run of each chunk; 1 where the chunk starts from an initial state.
    runs: jax.Array | None = None


class Placement(NamedTuple):
    """A layout with the ways to it and back."""

    layout: Layout
    place: Callable[[jax.Array], jax.Array]  # tokens [B, T, ...] into whole chunks
    take_back: Callable[[jax.Array], jax.Array]


def place_tokens(num_tokens, num_runs, segment_ids, per_run, continues) -> Placement:
    """Lay rows out.

    Args:
        num_tokens: T.
        num_runs: N.
        segment_ids: [B, T] or None.
        per_run: whether each of N runs has a state of its own.
        continues: [B, N] bool or None.
    """
    if segment_ids is None or not per_run:
        layout = Layout() if segment_ids is None else _mark_runs(segment_ids)
        return Placement(layout, lambda x: pad(x, 1, CHUNK), lambda x: x[:, :num_tokens])
    run, real = number_runs(segment_ids)
    place, token, slot = align_runs(run, real, num_runs=num_runs, multiple=CHUNK)
    before = jnp.pad(slot[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    fresh = slot != before
    if continues is not None:
        fresh &= (before < 0) | ~jnp.take_along_axis(continues, slot, axis=1)
    layout = Layout(runs=jnp.stack([slot, fresh.astype(jnp.int32)], axis=1))
    excess = real & (run >= num_runs)

    def take_back(x):
        taken = _take(x, place)
        return jnp.where(excess.reshape(excess.shape + (1,) * (x.ndim - 2)), jnp.nan, taken)

    return Placement(layout, lambda x: _take(x, token), take_back)


def pad(x: jax.Array, axis: int, multiple: int = BLOCK, **options) -> jax.Array:
    """Pad with zeros to a multiple: zeros are neutral as tokens and as channels."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, **options) if widths[axis][1] else x


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Take tokens [B, T, ...] by position [B, M]; positions past the end give zeros."""
    rows = jnp.arange(x.shape[0])[:, None]
    return x.at[rows, index].get(mode="fill", fill_value=0)


def _mark_runs(segment_ids: jax.Array) -> Layout:
    run = pad(number_runs(segment_ids)[0], 1, CHUNK, mode="edge")
    by_chunk = run.reshape(run.shape[0], -1, CHUNK)
    last = by_chunk[..., -1:]
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0), (0, 0)))  # the row starts in run 0
    from_start, to_end = by_chunk == before, by_chunk == last
    marks = [x.reshape(run.shape).astype(jnp.float32) for x in (run, from_start, to_end)]
    return Layout(marks=jnp.stack(marks, axis=1), resets=~from_start[..., -1])


def occurring(runs: jax.Array, num_runs: int, *, fresh: bool) -> jax.Array:
    """Return which runs have chunks [B, N], or those which start from their initial state."""
    slot, is_fresh = runs[:, 0], runs[:, 1]
    found = slot[..., None] == jnp.arange(num_runs)
    return jnp.any(found & (is_fresh[..., None] == 1) if fresh else found, axis=1)
