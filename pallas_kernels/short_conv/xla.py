"""The short convolution as shifted multiply-adds, with its own backward pass.

Taps are few, so W shifted copies that XLA fuses into one pass are faster than a convolution
routine. Shifting is right as soon as the tokens of a segment stand side by side. Padding between
them is removed first (one gather in, one out), but only when a batch really has such padding:
the test is a `cond` on the segment ids. The backward pass stores the operands alone.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.checks import align_varying


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """The tap gradients are column sums, which are slow once their operands leave the cache."""

    tokens: int  # tokens per step of the loop
    whole_below: int  # elements of one batch below which the loop does not pay


TILES = BackwardTiles(tokens=64, whole_below=2**21)


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


def _keep(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    """Return x [B, T, H, K] where mask [B, T] holds, else 0: what is masked may be NaN."""
    return x if mask is None else jnp.where(mask[:, :, None, None], x, 0)


def _same_segment(segment_ids: jax.Array | None, taps: int) -> list[jax.Array | None]:
    """Return for n = 0 .. taps-1 whether tokens t-n .. t are real and of one segment [B, T]."""
    if segment_ids is None:
        return [None] * taps  # what lies before the row is zero already
    same = [segment_ids != 0]
    for n in range(1, taps):
        same.append(same[-1] & (_shift(segment_ids, n) == segment_ids))
    return jax.lax.optimization_barrier(same)  # small; not to be recomputed for each channel


# --- tokens of a segment side by side -----------------------------------------------------------


def _preactivation(x: jax.Array, weight: jax.Array, same: list[jax.Array | None]) -> jax.Array:
    x = x.astype(weight.dtype)
    taps = weight.shape[0]
    return sum(weight[taps - 1 - n] * _keep(same[n], _shift(x, n)) for n in range(taps))


def _forward_adjacent(x: jax.Array, weight: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    total = _preactivation(x, weight, _same_segment(segment_ids, weight.shape[0]))
    return (total * jax.nn.sigmoid(total)).astype(x.dtype)


def _backward_adjacent(
    x: jax.Array, weight: jax.Array, segment_ids: jax.Array | None, d_output: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of x and weight, both in weight.dtype."""
    taps = weight.shape[0]
    same = _same_segment(segment_ids, taps)
    total = _preactivation(x, weight, same)
    gate = jax.nn.sigmoid(total)
    d_total = _keep(same[0], d_output.astype(weight.dtype) * gate * (1 + total * (1 - gate)))
    # Without the barrier every sum below evaluates silu again: 14 times slower at T 4096.
    d_total = jax.lax.optimization_barrier(d_total)
    x = x.astype(weight.dtype)
    d_x = jnp.zeros_like(x)
    d_weight = []
    for n in range(taps):
        masked = _keep(same[n], d_total)
        d_x += weight[taps - 1 - n] * _shift(masked, -n)
        d_weight.append(jnp.sum(_keep(same[n], _shift(x, n)) * d_total, axis=(0, 1)))
    return d_x, jnp.stack(d_weight[::-1])


def _backward_tiled(
    x: jax.Array, weight: jax.Array, segment_ids: jax.Array | None, d_output: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`_backward_adjacent` over windows of tokens that each begin W-1 tokens early."""
    length = x.shape[1]
    halo, tile = weight.shape[0] - 1, TILES.tokens
    num_tiles = -(-length // tile)
    after = num_tiles * tile - length

    def extend(array):
        return jnp.pad(array, [(0, 0), (halo, after)] + [(0, 0)] * (array.ndim - 2))

    def window(array, start):
        return jax.lax.dynamic_slice_in_dim(array, start, tile + halo, axis=1)

    x, d_output = extend(x), extend(d_output)
    segment_ids = None if segment_ids is None else extend(segment_ids)
    is_own = (jnp.arange(tile + halo) >= halo)[None]  # the halo's outputs are of the tile before

    def step(carry, index):
        d_x, d_weight = carry
        start = index * tile
        ids = None if segment_ids is None else window(segment_ids, start)
        own = _keep(is_own, window(d_output, start))
        d_window, d_taps = _backward_adjacent(window(x, start), weight, ids, own)
        d_window += window(d_x, start)
        d_x = jax.lax.dynamic_update_slice_in_dim(d_x, d_window, start, axis=1)
        return (d_x, d_weight + d_taps), None

    start = (jnp.zeros_like(x, dtype=weight.dtype), jnp.zeros_like(weight))
    (d_x, d_weight), _ = jax.lax.scan(step, start, jnp.arange(num_tiles))
    return d_x[:, halo : halo + length], d_weight


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


# --- the differentiable whole --------------------------------------------------------------------


@jax.custom_vjp
def _convolve(x: jax.Array, weight: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Return silu(conv(x)) with zeros before the row, computed in weight.dtype, in x.dtype."""
    if segment_ids is None:
        return _forward_adjacent(x, weight, None)

    def compacted(x):
        order, place = _compaction(segment_ids)
        output = _forward_adjacent(_reorder(x, order), weight, _reorder(segment_ids, order))
        return _reorder(output, place)

    def adjacent(x):
        return _forward_adjacent(x, weight, segment_ids)

    return jax.lax.cond(_has_holes(segment_ids), compacted, adjacent, x)


def _convolve_forward(x, weight, segment_ids):
    return _convolve(x, weight, segment_ids), (x, weight, segment_ids)


def _convolve_backward(operands, d_output):
    x, weight, segment_ids = operands
    backward = _backward_adjacent if x.size < TILES.whole_below else _backward_tiled

    def compacted(x, d_output):
        order, place = _compaction(segment_ids)
        arrays = _reorder(x, order), weight, _reorder(segment_ids, order)
        d_x, d_weight = backward(*arrays, _reorder(d_output, order))
        return _reorder(d_x, place), d_weight

    def adjacent(x, d_output):
        return backward(x, weight, segment_ids, d_output)

    if segment_ids is None:
        d_x, d_weight = adjacent(x, d_output)
    else:
        d_x, d_weight = jax.lax.cond(_has_holes(segment_ids), compacted, adjacent, x, d_output)
    return d_x.astype(x.dtype), d_weight, None


_convolve.defvjp(_convolve_forward, _convolve_backward)
