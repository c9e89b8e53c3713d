"""KDA in chunks: runs of tokens are turned into marks or placed apart, then the groups run."""

import jax
import jax.numpy as jnp

from pallas_kernels.kda.chunk import Runs
from pallas_kernels.kda.groups import Layout, run_groups
from pallas_kernels.kda.schedule import Schedule, choose_schedule
from pallas_kernels.kda.segments import align_runs, number_runs


def kda_xla(
    q, k, v, log_decay, beta,
    *, scale, initial_state, segment_ids, per_run, log_decay_min, continues=None,
):  # fmt: skip
    """Compute what `kda_reference` defines; the arguments are the same, in any float dtype.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, H, V].
        log_decay: [B, T, H, K].
        beta: [B, T, H].
        scale: as in `kda_reference`.
        initial_state: likewise; its dtype is that of the computation.
        segment_ids: likewise.
        per_run: likewise.
        log_decay_min: promise on the decay, or None.
        continues: with `per_run`, bool [B, N] or None: a run starts with the state that the run
            before it leaves, and its own initial state is not used. False for the first run.

    Returns:
        (output [B, T, H, V] in v's dtype, final_state [B, N, H, K, V]).
    """
    num_tokens, num_runs = q.shape[1], initial_state.shape[1]
    schedule = choose_schedule(num_tokens, log_decay_min)
    arrays = (q, k, v, log_decay, beta)
    if segment_ids is None and per_run:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    if segment_ids is None:
        arrays = tuple(_pad(x, schedule.group_tokens) for x in arrays)
        output, final_state = run_groups(arrays, initial_state, Layout(), scale, schedule)
        return output[:, :num_tokens], final_state
    run, real = number_runs(segment_ids)
    if not per_run:
        layout = _mark_runs(run, real, schedule)
        arrays = tuple(_pad(x, schedule.group_tokens) for x in arrays)
        output, final_state = run_groups(arrays, initial_state, layout, scale, schedule)
        return output[:, :num_tokens], final_state
    place, token, slot = align_runs(run, real, num_runs=num_runs, multiple=schedule.group_tokens)
    arrays = tuple(_take(x, token) for x in arrays)
    layout = Layout(slot=slot, source=None if continues is None else _sources(slot, continues))
    output, final_state = run_groups(arrays, initial_state, layout, scale, schedule)
    output = _take(output, place)
    excess = real & (run >= num_runs)
    return jnp.where(excess[..., None, None], jnp.nan, output), final_state


def _pad(x: jax.Array, multiple: int, **kwargs) -> jax.Array:
    """Pad tokens [B, T, ...] at the end: zeros are neutral, they leave the state as it is."""
    missing = -x.shape[1] % multiple
    return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2), **kwargs)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Take tokens [B, T, ...] by position [B, M]; positions past the end give zeros."""
    rows = jnp.arange(x.shape[0])[:, None]
    return x.at[rows, index].get(mode="fill", fill_value=0)


def _sources(slot: jax.Array, continues: jax.Array) -> jax.Array:
    """Return which state each group [B, groups] continues: the run's own, or the one before it."""
    before = jnp.pad(slot[:, :-1], ((0, 0), (1, 0)))  # a row starts in run 0
    opens = slot != before
    return jnp.where(opens & jnp.take_along_axis(continues, slot, axis=1), slot - 1, slot)


def _mark_runs(run: jax.Array, real: jax.Array, schedule: Schedule) -> Layout:
    """Pad run numbers to whole groups and mark the tokens connected to their chunk's ends."""
    run = _pad(run, schedule.group_tokens, mode="edge")
    by_chunk = run.reshape(run.shape[0], -1, schedule.chunk)
    last = by_chunk[..., -1:]
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0), (0, 0)))  # the row starts in run 0
    runs = Runs(run, (by_chunk == before).reshape(run.shape), (by_chunk == last).reshape(run.shape))
    return Layout(real=_pad(real, schedule.group_tokens), runs=runs)
