"""What the kernels of both platforms share: where segments start, and the windows at tile starts.

The kernels walk over the tokens of a tile with the last W-1 real inputs in registers, so padding
may stand anywhere. What they know of a token is its kind; what they know of the tokens before the
tile are their inputs, gathered here: W-1 tokens per tile.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checks import align_varying, empty

# Kinds of tokens.
ABSENT, CONTINUES, STARTS = 0, 1, 2  # the first segment of a row continues what was before it


def unsupported(x: jax.Array) -> str | None:
    """Why the kernels do not take these inputs, or None."""
    if problem := empty(x=x):
        return problem
    width = x.shape[-1]
    if width % 128:
        return f"K={width} is not a multiple of 128"
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x has dtype {x.dtype}; float32 and bfloat16 are supported"
    return None


def _last_real(is_real: jax.Array) -> jax.Array:
    """Index of the last real token before each position, -1 for none: [B, T] -> [B, T+1]."""
    index = jnp.where(is_real, jnp.arange(is_real.shape[1]), -1)
    return jnp.pad(jax.lax.cummax(index, axis=1), ((0, 0), (1, 0)), constant_values=-1)


def token_kinds(segment_ids: jax.Array) -> jax.Array:
    """`ABSENT`, `CONTINUES` or `STARTS` for each token [B, T] int32."""
    is_real = segment_ids != 0
    before = _last_real(is_real)[:, :-1]
    id_before = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    starts = is_real & (before >= 0) & (id_before != segment_ids)
    return is_real.astype(jnp.int32) + starts.astype(jnp.int32)


def last_inputs(x: jax.Array, segment_ids: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Return the last `num` real inputs of a stretch of tokens, of whatever segments.

    Args:
        x: inputs [B, T, H, K].
        segment_ids: [B, T].
        num: how many.

    Returns:
        inputs [B, num, H, K], oldest first, and their ids [B, num]; what is missing has id 0 and
        stands first.
    """
    last_real = _last_real(segment_ids != 0)
    index, found = last_real[:, -1], []
    for _ in range(num):
        found.append(index)
        before = jnp.take_along_axis(last_real, jnp.maximum(index, 0)[:, None], axis=1)[:, 0]
        index = jnp.where(index >= 0, before, -1)
    index = jnp.stack(found[::-1], axis=1)
    clipped = jnp.maximum(index, 0)
    ids = jnp.take_along_axis(segment_ids, clipped, axis=1)
    inputs = jnp.take_along_axis(x, clipped[:, :, None, None], axis=1)
    is_real = index >= 0
    return jnp.where(is_real[:, :, None, None], inputs, 0), jnp.where(is_real, ids, 0)


def inputs_before(
    x: jax.Array,
    kinds: jax.Array | None,
    initial_state: jax.Array | None,
    positions: np.ndarray,
    num: int,
) -> jax.Array:
    """Return the last `num` inputs of the segment before each position [B, P, num, H, K].

    Args:
        x: inputs [B, T, H, K].
        kinds: kinds of the tokens [B, T], or None when all continue.
        initial_state: inputs before the row [B, num, H, K], or None for zeros.
        positions: indices of tokens [P], T for the end of the row.
        num: inputs per position, oldest first.
    """
    batch, length = x.shape[:2]
    if initial_state is None:
        initial_state = jnp.zeros((batch, num, *x.shape[2:]), x.dtype)
    if kinds is None:
        index = positions[:, None] - num + np.arange(num)  # [P, num]
        tokens = jnp.take(x, np.clip(index, 0, length - 1), axis=1)
        if (index >= 0).all():
            return tokens
        states = jnp.take(initial_state, np.clip(num + index, 0, num - 1), axis=1)
        return jnp.where((index >= 0)[:, :, None, None], tokens, states)

    def pick(array, index):  # [B, S, H, K], [B, P] -> [B, P, H, K]
        return jnp.take_along_axis(array, index[:, :, None, None], axis=1)

    last_real = _last_real(kinds != ABSENT)
    index = last_real[:, positions]  # [B, P]
    found, in_segment, inputs = jnp.zeros_like(index), jnp.ones_like(index, dtype=bool), []
    for back in range(1, num + 1):
        exists = index >= 0
        clipped = jnp.maximum(index, 0)
        state = pick(initial_state, jnp.clip(num - back + found, 0, num - 1))
        value = jnp.where(exists[:, :, None, None], pick(x, clipped), state)
        inputs.append(jnp.where(in_segment[:, :, None, None], value, 0))
        starts = jnp.take_along_axis(kinds, clipped, axis=1) == STARTS
        in_segment &= ~(exists & starts)
        found += exists
        index = jnp.where(exists, jnp.take_along_axis(last_real, clipped, axis=1), -1)
    return jnp.stack(inputs[::-1], axis=2)


def tokens_after(
    arrays: tuple[jax.Array, ...], kinds: jax.Array | None, positions: np.ndarray, num: int
) -> tuple[list[jax.Array], jax.Array]:
    """Return the next `num` tokens of the segment that reaches up to each position.

    Args:
        arrays: [B, T, H, K] each.
        kinds: kinds of the tokens [B, T], or None when all continue.
        positions: indices of tokens [P], T for the end of the row.
        num: tokens per position, in order.

    Returns:
        the tokens of each array [B, P, num, H, K], and whether they exist [B, P, num] int32; what
        stands for those that do not is arbitrary.
    """
    batch, length = arrays[0].shape[:2]
    if kinds is None:
        index = positions[:, None] + np.arange(num)  # [P, num]
        exists = jnp.broadcast_to(jnp.int32(index < length), (batch, *index.shape))
        index = np.minimum(index, length - 1)
        return [jnp.take(array, index, axis=1) for array in arrays], exists
    forth = jnp.where(kinds != ABSENT, jnp.arange(length), length)
    next_real = jax.lax.cummin(forth, axis=1, reverse=True)  # at or after each token
    next_real = jnp.pad(next_real, ((0, 0), (0, 1)), constant_values=length)
    index, in_segment, indices, exists = next_real[:, positions], True, [], []
    for _ in range(num):
        clipped = jnp.minimum(index, length - 1)
        starts = jnp.take_along_axis(kinds, clipped, axis=1) == STARTS
        in_segment = in_segment & (index < length) & ~starts
        indices.append(clipped)
        exists.append(in_segment)
        index = jnp.take_along_axis(next_real, jnp.minimum(index + 1, length), axis=1)
    flat = jnp.stack(indices, axis=2).reshape(batch, -1)[:, :, None, None]
    shape = (batch, len(positions), num)
    tokens = [
        jnp.take_along_axis(array, flat, axis=1).reshape(*shape, *array.shape[2:])
        for array in arrays
    ]
    return tokens, jnp.stack(exists, axis=2).astype(jnp.int32)


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """Return the op made of two kernels, with the signature of the other forms.

    Args:
        forward: (x, weight [W, H, K] float32, kinds [B, T] or None, initial_state or None) ->
            output.
        backward: (x, weight, kinds, initial_state, d_output) -> d_x, d_weight and d_state
            [B, W-1, H, K], both float32.
    """

    @jax.custom_vjp
    def convolve(x, weight, kinds, initial_state):
        return forward(x, weight, kinds, initial_state)

    def convolve_forward(*operands):
        return forward(*operands), operands

    def convolve_backward(operands, d_output):
        d_x, d_weight, d_state = backward(*operands, d_output)
        initial_state = operands[3]
        if initial_state is not None:
            initial_state = d_state.astype(initial_state.dtype)
        return d_x, d_weight, None, initial_state

    convolve.defvjp(convolve_forward, convolve_backward)

    def short_conv(x, weight, segment_ids, initial_state):
        """See `pallas_kernels.short_conv`."""
        kinds = None if segment_ids is None else token_kinds(segment_ids)
        operands = (x, weight.astype(jnp.float32), kinds, initial_state)
        aligned = iter(align_varying(*[o for o in operands if o is not None]))
        x, weight, kinds, initial_state = (None if o is None else next(aligned) for o in operands)
        output = convolve(x, weight, kinds, initial_state)
        end = np.array([x.shape[1]])
        final_state = inputs_before(x, kinds, initial_state, end, weight.shape[0] - 1)
        return output, final_state[:, 0]

    return short_conv
