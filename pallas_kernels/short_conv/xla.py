"""The short convolution as shifted multiply-adds, with its own backward pass.

Taps are few, so W shifted copies that XLA fuses into one pass are faster than a convolution
routine. Shifting is right as soon as the tokens of a segment stand side by side. Padding between
them is removed first (one gather in, one out), but only when a batch really has such padding:
the test is a `cond` on the segment ids. The backward pass stores the operands alone.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import align_varying


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    segment_ids: jax.Array | None,
    initial_state: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.short_conv`."""
    taps = weight.shape[0]
    weight = weight.astype(jnp.promote_types(x.dtype, jnp.float32))
    operands = (x, weight, segment_ids, initial_state)
    given = [operand for operand in operands if operand is not None]
    aligned = iter(align_varying(*given))
    x, weight, segment_ids, initial_state = (
        None if operand is None else next(aligned) for operand in operands
    )
    if initial_state is None:
        output = _convolve(x, weight, segment_ids)
        return output, _last_inputs(x, segment_ids, taps - 1)
    # The state is what stood before the row: prepend it as tokens of the first real segment.
    x = jnp.concatenate([initial_state, x], axis=1)
    if segment_ids is not None:
        first = jnp.argmax(segment_ids != 0, axis=1)[:, None]
        first_id = jnp.take_along_axis(segment_ids, first, axis=1)
        first_id = jnp.where(first_id == 0, 1, first_id)  # a row without real tokens keeps it
        history = jnp.broadcast_to(first_id, (x.shape[0], taps - 1))
        segment_ids = jnp.concatenate([history, segment_ids], axis=1)
    output = _convolve(x, weight, segment_ids)[:, taps - 1 :]
    return output, _last_inputs(x, segment_ids, taps - 1)


def _last_inputs(x: jax.Array, segment_ids: jax.Array | None, num: int) -> jax.Array:
    """Return the last `num` real inputs of the last segment [B, num, H, K], zeros before them."""
    length = x.shape[1]
    if segment_ids is None:
        missing = max(num - length, 0)
        return jnp.pad(x, ((0, 0), (missing, 0), (0, 0), (0, 0)))[:, length + missing - num :]
    is_real = segment_ids != 0
    rank = jnp.cumsum(is_real, axis=1)  # 1 at the first real token
    inputs, last_id, in_segment = [], None, True
    for back in range(num):  # 0 is the last real token
        wanted = rank[:, -1:] - back
        index = jnp.argmax(is_real & (rank == wanted), axis=1)[:, None]
        token_id = jnp.take_along_axis(segment_ids, index, axis=1)
        last_id = token_id if last_id is None else last_id
        in_segment &= (wanted > 0) & (token_id == last_id)
        token = jnp.take_along_axis(x, index[:, :, None, None], axis=1)
        inputs.append(jnp.where(in_segment[:, :, None, None], token, 0))
    return jnp.concatenate(inputs[::-1], axis=1)


def _shift(x: jax.Array, steps: int) -> jax.Array:
    """Move tokens `steps` later (earlier when negative) along axis 1, filling with zeros."""
    length = x.shape[1]
    before, after = max(steps, 0), max(-steps, 0)
    padding = [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding)[:, after : after + length]


def _reach(segment_ids: jax.Array, taps: int) -> jax.Array:
    """Return how many tokens back each one's window goes [B, T]: 0 .. taps-1, -1 for padding."""
    inside = segment_ids != 0
    reach = inside.astype(jnp.int32) - 1
    for n in range(1, taps):
        inside &= _shift(segment_ids, n) == segment_ids
        reach += inside
    return reach


def _within(reach: jax.Array | None, n: int, x: jax.Array) -> jax.Array:
    """Return x [B, T, H, K] where windows reach n tokens back, else 0 (what is there may be NaN).

    None stands for a single segment without padding: what lies before it is zero already.
    """
    return x if reach is None else jnp.where((reach >= n)[:, :, None, None], x, 0)


# --- tokens of a segment side by side -----------------------------------------------------------


def _preactivation(x: jax.Array, weight: jax.Array, reach: jax.Array | None) -> jax.Array:
    x = x.astype(weight.dtype)
    taps = weight.shape[0]
    return sum(weight[taps - 1 - n] * _within(reach, n, _shift(x, n)) for n in range(taps))


def _forward_adjacent(x: jax.Array, weight: jax.Array, reach: jax.Array | None) -> jax.Array:
    total = _preactivation(x, weight, reach)
    return (total * jax.nn.sigmoid(total)).astype(x.dtype)


def _backward_adjacent(
    x: jax.Array, weight: jax.Array, reach: jax.Array | None, d_output: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of x and weight, both in weight.dtype."""
    taps = weight.shape[0]
    total = _preactivation(x, weight, reach)
    gate = jax.nn.sigmoid(total)
    # Written so that XLA keeps d_total in memory: with the division in its last fusion it is too
    # dear to be evaluated again in each sum below (10 times slower at T 4096).
    d_total = _within(reach, 0, d_output.astype(weight.dtype)) * gate * (1 + total * (1 - gate))
    d_total, x = jax.lax.optimization_barrier((d_total, x))
    x = x.astype(weight.dtype)
    d_x = jnp.zeros_like(x)
    d_weight = []
    for n in range(taps):
        d_x += weight[taps - 1 - n] * _shift(_within(reach, n, d_total), -n)
        d_weight.append(jnp.sum(_within(reach, n, _shift(x, n)) * d_total, axis=(0, 1)))
    return d_x, jnp.stack(d_weight[::-1])


# --- padding between the tokens of a segment -----------------------------------------------------


def _has_holes(segment_ids: jax.Array) -> jax.Array:
    """Whether any row has padding between real tokens [] bool."""
    is_real = segment_ids != 0
    starts = is_real & ~_shift(is_real, 1)
    return jnp.any(jnp.sum(starts, axis=1) > 1)


def _compaction(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the permutation that puts real tokens first, in order, and its inverse [B, T]."""
    is_real = segment_ids != 0
    num_real = jnp.sum(is_real, axis=1, keepdims=True)
    padding_rank = num_real + jnp.cumsum(~is_real, axis=1) - 1
    place = jnp.where(is_real, jnp.cumsum(is_real, axis=1) - 1, padding_rank)
    return jnp.argsort(place, axis=1), place


def _reorder(x: jax.Array, index: jax.Array) -> jax.Array:
    index = index.reshape(index.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="clip")


def _by_adjacency(function, segment_ids: jax.Array | None, taps: int, *arrays: jax.Array):
    """Return function(reach, *arrays), given arrays in which no segment has padding inside.

    Args:
        function: (reach [B, T] or None, arrays) -> (array [B, T, H, K], anything without tokens).
        segment_ids: [B, T], or None when every token is real and of one segment.
        taps: length of the windows.
        *arrays: [B, T, H, K]; they and the array that is returned are in the order of tokens.
    """
    if segment_ids is None:
        return function(None, *arrays)

    def compacted(_, *arrays):
        order, place = _compaction(segment_ids)
        reach = _reach(_reorder(segment_ids, order), taps)
        result, rest = function(reach, *(_reorder(array, order) for array in arrays))
        return _reorder(result, place), rest

    # As an operand of the branches `reach` is in memory; inside of them its formula would be
    # evaluated again for each channel and tap.
    reach = _reach(segment_ids, taps)
    return jax.lax.cond(_has_holes(segment_ids), compacted, function, reach, *arrays)


# --- the differentiable whole --------------------------------------------------------------------


@jax.custom_vjp
def _convolve(x: jax.Array, weight: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Return silu(conv(x)) with zeros before the row, computed in weight.dtype, in x.dtype."""

    def forward(reach, x):
        return _forward_adjacent(x, weight, reach), ()

    return _by_adjacency(forward, segment_ids, weight.shape[0], x)[0]


def _convolve_forward(x, weight, segment_ids):
    return _convolve(x, weight, segment_ids), (x, weight, segment_ids)


def _convolve_backward(operands, d_output):
    x, weight, segment_ids = operands

    def backward(reach, x, d_output):
        return _backward_adjacent(x, weight, reach, d_output)

    d_x, d_weight = _by_adjacency(backward, segment_ids, weight.shape[0], x, d_output)
    return d_x.astype(x.dtype), d_weight, None


_convolve.defvjp(_convolve_forward, _convolve_backward)
