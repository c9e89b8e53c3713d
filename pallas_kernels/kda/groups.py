"""Groups of chunks under one scan, with a backward pass of their own.

The forward pass keeps the inputs and the state before each group; the backward pass walks the
groups in reverse, runs each forward once more and then its gradient, so that nothing of the size
of a chunk times a chunk, or larger, is ever stored for the whole sequence.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.checks import align_varying
from pallas_kernels.kda.chunk import Runs, Tokens, chunk_backward, chunk_forward
from pallas_kernels.kda.schedule import Schedule


class Layout(NamedTuple):
    """Which run each token or group belongs to; None where there is nothing to say."""

    real: jax.Array | None = None  # [B, T] bool
    runs: Runs | None = None  # [B, T] each
    slot: jax.Array | None = None  # [B, groups], which of the N states a group leaves behind
    source: jax.Array | None = None  # [B, groups], which one it continues, slot where None


def run_groups(
    arrays: tuple, initial_state: jax.Array, layout: Layout, scale: float, schedule: Schedule
) -> tuple[jax.Array, jax.Array]:
    """Run whole groups of tokens.

    Args:
        arrays: q, k [B, T, H, K], v [B, T, H, V], log_decay [B, T, H, K], beta [B, T, H], T a
            multiple of `schedule.group_tokens`, in any float dtype.
        initial_state: [B, N, H, K, V], its dtype is that of the computation. N > 1 needs
            `layout.slot`.
        layout: where runs begin and end.
        scale: multiplies q.
        schedule: how to cut.

    Returns:
        (output [B, T, H, V] in v's dtype, states [B, N, H, K, V]).
    """
    *arrays, initial_state = align_varying(*arrays, initial_state)
    return _run(tuple(arrays), initial_state, layout, float(scale), schedule)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _run(arrays, initial_state, layout, scale, schedule):
    states, (output, _) = _scan_forward(arrays, initial_state, layout, scale, schedule, False)
    return _tokens_first(output), states


def _run_forward(arrays, initial_state, layout, scale, schedule):
    states, (output, kept) = _scan_forward(arrays, initial_state, layout, scale, schedule, True)
    return (_tokens_first(output), states), (arrays, layout, kept)


def _scan_forward(arrays, initial_state, layout, scale, schedule, keep):
    def step(states, group):
        state = before = _load(states, layout, group)
        outputs = []
        for tokens, runs in _read(arrays, layout, group, scale, schedule, states.dtype):
            output, state, _ = chunk_forward(state, tokens, runs, bounded=schedule.bounded)
            outputs.append(jnp.moveaxis(output, 1, 2))
        output = _absent_as_zero(jnp.concatenate(outputs, axis=1), layout, group, schedule)
        output = output.astype(arrays[2].dtype)
        return _store(states, layout, group, state), (output, before if keep else None)

    num_groups = arrays[0].shape[1] // schedule.group_tokens
    return jax.lax.scan(step, initial_state, jnp.arange(num_groups))


def _run_backward(scale, schedule, residuals, cotangents):
    arrays, layout, kept = residuals
    d_output, d_states = cotangents

    def step(d_states, inputs):
        group, state = inputs
        chunks = []
        for tokens, runs in _read(arrays, layout, group, scale, schedule, d_states.dtype):
            _, state, chunk = chunk_forward(state, tokens, runs, bounded=schedule.bounded)
            chunks.append(chunk)
        d_state = _pick(d_states, layout.slot, group)
        d_group = _slice(d_output, group, schedule).astype(d_states.dtype)
        d_group = _absent_as_zero(d_group, layout, group, schedule)
        d_group = _split(d_group, schedule)
        d_tokens = [None] * schedule.group
        for index in reversed(range(schedule.group)):
            d_tokens[index], d_state = chunk_backward(chunks[index], d_group[index], d_state)
        d_arrays = [
            jnp.concatenate([jnp.moveaxis(x, 1, 2) for x in chunks], axis=1)
            for chunks in zip(*d_tokens, strict=True)
        ]
        d_arrays[0] = d_arrays[0] * scale
        d_arrays = [_absent_as_zero(x, layout, group, schedule) for x in d_arrays]
        d_arrays = [x.astype(array.dtype) for x, array in zip(d_arrays, arrays, strict=True)]
        return _store_gradient(d_states, layout, group, d_state), tuple(d_arrays)

    groups = (jnp.arange(kept.shape[0]), kept)
    d_initial_state, d_arrays = jax.lax.scan(step, d_states, groups, reverse=True)
    return tuple(_tokens_first(x) for x in d_arrays), d_initial_state, None


_run.defvjp(_run_forward, _run_backward)


def _read(arrays, layout, group, scale, schedule, dtype) -> list[tuple[Tokens, Runs | None]]:
    """Slice a group, in the dtype of the computation, and split it into chunks, heads first."""
    arrays = [_slice(x, group, schedule).astype(dtype) for x in arrays]
    arrays = [_absent_as_zero(x, layout, group, schedule) for x in arrays]
    arrays[0] = arrays[0] * scale
    chunks = [Tokens(*chunk) for chunk in zip(*(_split(x, schedule) for x in arrays), strict=True)]
    if layout.runs is None:
        return [(chunk, None) for chunk in chunks]
    marks = [jnp.split(_slice(x, group, schedule), schedule.group, axis=1) for x in layout.runs]
    return list(zip(chunks, (Runs(*mark) for mark in zip(*marks, strict=True)), strict=True))


def _split(x: jax.Array, schedule: Schedule) -> list[jax.Array]:
    """Split a group [B, tokens, H, ...] into chunks [B, H, C, ...]."""
    return [jnp.moveaxis(chunk, 2, 1) for chunk in jnp.split(x, schedule.group, axis=1)]


def _slice(x: jax.Array, group: jax.Array, schedule: Schedule) -> jax.Array:
    tokens = schedule.group_tokens
    return jax.lax.dynamic_slice_in_dim(x, group * tokens, tokens, axis=1)


def _absent_as_zero(x, layout, group, schedule) -> jax.Array:
    """Replace what absent tokens of a group hold: zeros leave the state as it is."""
    if layout.real is None:
        return x
    real = _slice(layout.real, group, schedule)
    return jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, 0)


def _tokens_first(groups: jax.Array) -> jax.Array:
    """Join what a scan over groups stacked: [G, B, tokens, ...] -> [B, G * tokens, ...]."""
    joined = jnp.moveaxis(groups, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])


def _load(states: jax.Array, layout: Layout, group: jax.Array) -> jax.Array:
    """Return the state [B, H, K, V] that a group continues."""
    return _pick(states, layout.slot if layout.source is None else layout.source, group)


def _pick(states: jax.Array, slot: jax.Array | None, group: jax.Array) -> jax.Array:
    if slot is None:
        return states[:, 0]
    return states[jnp.arange(states.shape[0]), slot[:, group]]


def _store(states: jax.Array, layout: Layout, group: jax.Array, state: jax.Array) -> jax.Array:
    """Put the state after a group back."""
    if layout.slot is None:
        return state[:, None]
    return states.at[jnp.arange(states.shape[0]), layout.slot[:, group]].set(state)


def _store_gradient(d_states, layout: Layout, group: jax.Array, d_state: jax.Array) -> jax.Array:
    """Put the gradient of the state before a group back; the state it replaced has none."""
    if layout.source is None:
        return _store(d_states, layout, group, d_state)
    rows = jnp.arange(d_states.shape[0])
    d_states = d_states.at[rows, layout.slot[:, group]].set(0)
    return d_states.at[rows, layout.source[:, group]].add(d_state)
