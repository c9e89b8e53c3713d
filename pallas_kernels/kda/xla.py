"""KDA in chunks."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.kda.segments import align_runs, number_runs
from pallas_kernels.kda.tiles import scores
from pallas_kernels.kda.triangular import invert_unit_lower

_HIGHEST = jax.lax.Precision.HIGHEST


def _dot(spec, x, y):
    return jnp.einsum(spec, x, y, precision=_HIGHEST)


def _chunk(state, q, k, v, log_decay, beta, run, real, run_in, *, scale, leaf):
    """One chunk; arrays [B, C, H, *], run/real [B, C] or None."""
    if real is not None:
        q, k, v, log_decay = (jnp.where(real[..., None, None], x, 0) for x in (q, k, v, log_decay))
        beta = jnp.where(real[..., None], beta, 0)
    q, k, v, log_decay = (jnp.moveaxis(x, 2, 1) for x in (q, k, v, log_decay))
    beta = jnp.moveaxis(beta, 2, 1)[..., None]
    size = q.shape[-2]
    score, rows, keys, total = scores(scale * q, k, log_decay, leaf)
    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    lower = row >= column
    if run is not None:
        lower = lower & (run[:, None, :, None] == run[:, None, None, :])
        rows = rows * (run == run_in[:, None])[:, None, :, None]
        keys = keys * (run == run[:, -1:])[:, None, :, None]
        total = total * (run[:, -1:] == run_in[:, None])[:, :, None]
    score_q = jnp.where(lower, score[0], 0)
    score_k = jnp.where(lower & (row > column), score[1], 0)
    inverse = invert_unit_lower(beta * score_k)
    carried = _dot("xbhtk,bhkv->xbhtv", rows, state)
    update = _dot("bhts,bhsv->bhtv", inverse, beta * (v - carried[1]))
    output = carried[0] + _dot("bhts,bhsv->bhtv", score_q, update)
    state = total[..., None] * state + _dot("bhtk,bhtv->bhkv", keys, update)
    return state, jnp.moveaxis(output, 1, 2)


def kda_xla(q, k, v, log_decay, beta, *, scale, initial_state, segment_ids, per_run, log_decay_min):
    num_rows, num_tokens = q.shape[:2]
    chunk = 64
    leaf = 16 if log_decay_min is not None and log_decay_min >= -5 else 1
    run = real = slot = None
    arrays = [q, k, v, log_decay, beta]
    if segment_ids is None and per_run:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    if segment_ids is not None:
        run, real = number_runs(segment_ids)
    if per_run:
        place, token, slot = align_runs(run, real, num_runs=initial_state.shape[1], chunk=chunk)
        arrays = [_take(x, token) for x in arrays]
        known = real & (run < initial_state.shape[1])
        missing = real & ~known
        run = real = None
    length = arrays[0].shape[1]
    padded = -(-length // chunk) * chunk
    pad = padded - length

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(num_rows, -1, chunk, *x.shape[2:]), 1, 0)

    arrays = [split(x) for x in arrays]
    run_in = None
    if run is not None:
        run = jnp.pad(run, ((0, 0), (0, pad)), mode="edge")
        real = split(real)
        run = jnp.moveaxis(run.reshape(num_rows, -1, chunk), 1, 0)
        run_in = jnp.concatenate([jnp.zeros_like(run[:1, :, 0]), run[:-1, :, -1]])
    if slot is not None:
        slot = slot.T
    rows = jnp.arange(num_rows)

    @jax.checkpoint
    def step(states, inputs):
        *arrays, run, real, run_in, slot = inputs
        state = states[:, 0] if slot is None else states[rows, slot]
        state, output = _chunk(state, *arrays, run, real, run_in, scale=scale, leaf=leaf)
        states = state[:, None] if slot is None else states.at[rows, slot].set(state)
        return states, output

    states, output = jax.lax.scan(step, initial_state, (*arrays, run, real, run_in, slot))
    output = jnp.moveaxis(output, 0, 1).reshape(num_rows, padded, *v.shape[2:])[:, :length]
    if per_run:
        output = _take(output, place)
        output = jnp.where(missing[..., None, None], jnp.nan, output)
    elif segment_ids is not None:
        output = jnp.where((segment_ids != 0)[..., None, None], output, 0)
    return output, states


def _take(x, index):
    rows = jnp.arange(x.shape[0])[:, None]
    return x.at[rows, index].get(mode="fill", fill_value=0)
