"""The short convolution on TPU: a walk over the tokens with the window in registers.

A block holds some tokens of some heads, [tokens, heads, K]: heads and channels fill the vector
registers, so that going from one token to the next costs nothing. `_GROUP` tokens at once are
worked on without conditions where all of them continue their segment, else token by token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.short_conv.tokens import (
    ABSENT,
    CONTINUES,
    STARTS,
    differentiable,
    inputs_before,
    unsupported,
)
from pallas_kernels.tiles import choose_tiles

__all__ = ["Tiles", "short_conv", "unsupported"]

_GROUP = 8


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tokens (a multiple of 128) and heads (a multiple of 8) per block of each direction."""

    forward_tokens: int = 256
    forward_heads: int = 16
    backward_tokens: int = 256
    backward_heads: int = 16


def _kinds_operand(kinds, batch: int, length: int, tokens: int):
    """Kinds [B, 1, tiles x tokens], absent past the end of the row; None if all simply continue."""
    padding = -length % tokens
    if kinds is None:
        if padding == 0:
            return None
        kinds = jnp.full((batch, length), CONTINUES, jnp.int32)
    return jnp.pad(kinds, ((0, 0), (0, padding)))[:, None]


def _walk(tokens: int, kinds_ref, plain, conditional, *, backwards: bool = False) -> None:
    """Visit the tokens of a block in order.

    Args:
        tokens: number of them.
        kinds_ref: their kinds [1, 1, tokens] in scalar memory, or None when all continue.
        plain: function of a list of tokens that continue their segment.
        conditional: function of (token, kind).
        backwards: from the last token to the first.
    """

    def visit(first, size):
        group = [first + n for n in (range(size)[::-1] if backwards else range(size))]
        if kinds_ref is None:
            plain(group)
            return
        continues = functools.reduce(
            jnp.logical_and, [kinds_ref[0, 0, token] == CONTINUES for token in group]
        )

        @pl.when(continues)
        def _():
            plain(group)

        @pl.when(jnp.logical_not(continues))
        def _():
            def step(n, _):
                token = first + (size - 1 - n if backwards else n)
                conditional(token, kinds_ref[0, 0, token])
                return 0

            jax.lax.fori_loop(0, size, step, 0)

    whole = tokens // _GROUP

    def step(n, _):
        visit((whole - 1 - n if backwards else n) * _GROUP, _GROUP)
        return 0

    def rest():
        if tokens % _GROUP:
            visit(whole * _GROUP, tokens % _GROUP)

    if backwards:
        rest()
    jax.lax.fori_loop(0, whole, step, 0)
    if not backwards:
        rest()


def _weighted(weight, inputs):  # W x [heads, K] each
    return sum(w * value for w, value in zip(weight, inputs, strict=True))


def _read(ref) -> list[jax.Array]:
    return [ref[n] for n in range(ref.shape[0])]


def _write(ref, values) -> None:
    for n, value in enumerate(values):
        ref[n] = value


def _choose(condition, value, otherwise):
    """Select by a scalar."""
    otherwise = jnp.full_like(value, otherwise) if jnp.ndim(otherwise) == 0 else otherwise
    return jax.lax.select(condition, value, otherwise)


def _compiler_params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=32 * 2**20
    )


# --- forward -------------------------------------------------------------------------------------


def _forward_kernel(*refs, has_kinds, has_state):
    refs = list(refs)
    x_ref, weight_ref = refs.pop(0), refs.pop(0)
    kinds_ref = refs.pop(0) if has_kinds else None
    state_ref = refs.pop(0) if has_state else None
    output_ref, window_ref = refs

    @pl.when(pl.program_id(2) == 0)
    def start():
        if state_ref is None:
            window_ref[...] = jnp.zeros_like(window_ref)
        else:
            window_ref[...] = state_ref[0].astype(jnp.float32)

    def value_of(token):
        return x_ref[0, token].astype(jnp.float32)

    def plain(group):
        weight, window = _read(weight_ref), _read(window_ref)
        for token in group:
            inputs = [*window, value_of(token)]
            total = _weighted(weight, inputs)
            output_ref[0, token] = (total * jax.nn.sigmoid(total)).astype(output_ref.dtype)
            window = inputs[1:]
        _write(window_ref, window)

    def conditional(token, kind):
        is_real = kind != ABSENT
        window = [_choose(kind == STARTS, jnp.zeros_like(v), v) for v in _read(window_ref)]
        inputs = [*window, _choose(is_real, value_of(token), 0)]
        total = _weighted(_read(weight_ref), inputs)
        output = _choose(is_real, total * jax.nn.sigmoid(total), 0)
        output_ref[0, token] = output.astype(output_ref.dtype)

        @pl.when(is_real)
        def _():
            _write(window_ref, inputs[1:])

    _walk(x_ref.shape[1], kinds_ref, plain, conditional)


def _sizes(x, tokens: int, heads: int):
    """Tokens and heads per block, and the grid (B, head blocks, token tiles)."""
    batch, length, num_heads, _ = x.shape
    tokens, heads = min(tokens, length), min(heads, num_heads)
    return tokens, heads, (batch, pl.cdiv(num_heads, heads), pl.cdiv(length, tokens))


def _fetches(grid) -> int:
    """How often an array [.., H, K] without batch and tokens is fetched; what stays is not."""
    return grid[0] if grid[1] > 1 else 1


def _forward(x, weight, kinds, initial_state):
    tiles = choose_tiles("short_conv_tpu", Tiles())
    tokens, heads, grid = _sizes(x, tiles.forward_tokens, tiles.forward_heads)
    batch, length, num_heads, width = x.shape
    taps = weight.shape[0]
    if kinds is not None:  # tokens past the end come last and need no mask
        kinds = _kinds_operand(kinds, batch, length, tokens)
    row = pl.BlockSpec((1, tokens, heads, width), lambda b, h, i: (b, i, h, 0))
    operands, specs = [x, weight], [row]
    specs.append(pl.BlockSpec((taps, heads, width), lambda b, h, i: (0, h, 0)))
    if kinds is not None:
        operands.append(kinds)
        specs.append(_kinds_spec(tokens, lambda i: i))
    if initial_state is not None:
        operands.append(initial_state)
        specs.append(pl.BlockSpec((1, taps - 1, heads, width), lambda b, h, i: (b, 0, h, 0)))
    size, token_bytes = x.dtype.itemsize, num_heads * width
    bytes_accessed = (
        2 * x.size * size
        + 4 * weight.size * _fetches(grid)
        + (0 if kinds is None else 4 * kinds.size * grid[1])
        + (0 if initial_state is None else size * batch * (taps - 1) * token_bytes)
    )
    return pl.pallas_call(
        functools.partial(
            _forward_kernel, has_kinds=kinds is not None, has_state=initial_state is not None
        ),
        grid=grid,
        in_specs=specs,
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((taps - 1, heads, width), jnp.float32)],
        compiler_params=_compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=(2 * taps + 3) * x.size, transcendentals=x.size, bytes_accessed=bytes_accessed
        ),
        name="short_conv_forward",
    )(*operands)


def _kinds_spec(tokens: int, tile):
    return pl.BlockSpec((1, 1, tokens), lambda b, h, i: (b, 0, tile(i)), memory_space=pltpu.SMEM)


# --- backward ------------------------------------------------------------------------------------


def _backward_kernel(*refs, has_kinds, num_tiles):
    """Tiles from the last to the first; `following` holds the W-1 later d_total of the segment."""
    refs = list(refs)
    x_ref, d_output_ref, weight_ref, before_ref = (refs.pop(0) for _ in range(4))
    kinds_ref = refs.pop(0) if has_kinds else None
    d_x_ref, d_weight_ref, d_state_ref, d_total_ref, window_ref, following_ref = refs
    tokens = x_ref.shape[1]

    @pl.when(pl.program_id(2) == 0)
    def start():
        d_weight_ref[...] = jnp.zeros_like(d_weight_ref)
        following_ref[...] = jnp.zeros_like(following_ref)

    window_ref[...] = before_ref[0, 0].astype(jnp.float32)

    # In the order of time: the gradients before the silu, and the weight's.

    def d_total_of(inputs, d_output):
        total = _weighted(_read(weight_ref), inputs)
        gate = jax.nn.sigmoid(total)
        return d_output * gate * (1 + total * (1 - gate))

    def forward_plain(group):
        window = _read(window_ref)
        d_weight = _read(d_weight_ref.at[0])
        for token in group:
            inputs = [*window, x_ref[0, token].astype(jnp.float32)]
            d_total = d_total_of(inputs, d_output_ref[0, token].astype(jnp.float32))
            d_total_ref[token] = d_total
            d_weight = [d + d_total * v for d, v in zip(d_weight, inputs, strict=True)]
            window = inputs[1:]
        _write(window_ref, window)
        _write(d_weight_ref.at[0], d_weight)

    def forward_conditional(token, kind):
        @pl.when(kind != ABSENT)
        def _():
            window = [_choose(kind == STARTS, jnp.zeros_like(v), v) for v in _read(window_ref)]
            inputs = [*window, x_ref[0, token].astype(jnp.float32)]
            d_total = d_total_of(inputs, d_output_ref[0, token].astype(jnp.float32))
            d_total_ref[token] = d_total
            d_weight = zip(_read(d_weight_ref.at[0]), inputs, strict=True)
            _write(d_weight_ref.at[0], [d + d_total * v for d, v in d_weight])
            _write(window_ref, inputs[1:])

    _walk(tokens, kinds_ref, forward_plain, forward_conditional)

    # Against time: each input is in the windows of itself and the W-1 tokens that follow.

    def backward_plain(group):
        weight, following = _read(weight_ref)[::-1], _read(following_ref)
        for token in group:
            d_totals = [d_total_ref[token], *following]
            d_x_ref[0, token] = _weighted(weight, d_totals).astype(d_x_ref.dtype)
            following = d_totals[:-1]
        _write(following_ref, following)

    def backward_conditional(token, kind):
        @pl.when(kind != ABSENT)
        def _():
            d_totals = [d_total_ref[token], *_read(following_ref)]
            d_x = _weighted(_read(weight_ref)[::-1], d_totals)
            d_x_ref[0, token] = d_x.astype(d_x_ref.dtype)
            following = [_choose(kind == STARTS, jnp.zeros_like(d), d) for d in d_totals[:-1]]
            _write(following_ref, following)

        @pl.when(kind == ABSENT)
        def _():
            d_x_ref[0, token] = jnp.zeros_like(d_x_ref[0, token])

    _walk(tokens, kinds_ref, backward_plain, backward_conditional, backwards=True)

    @pl.when(pl.program_id(2) == num_tiles - 1)
    def finish():
        weight, following = _read(weight_ref), _read(following_ref)
        for j in range(len(following)):
            d_state_ref[0, j] = _weighted(weight[j::-1], following[: j + 1])


def _backward(x, weight, kinds, initial_state, d_output):
    tiles = choose_tiles("short_conv_tpu", Tiles())
    tokens, heads, grid = _sizes(x, tiles.backward_tokens, tiles.backward_heads)
    batch, length, num_heads, width = x.shape
    taps, num_tiles = weight.shape[0], grid[2]
    positions = np.arange(num_tiles) * tokens
    before = inputs_before(x, kinds, initial_state, positions, taps - 1)
    kinds = _kinds_operand(kinds, batch, length, tokens)

    def tile(i):
        return num_tiles - 1 - i

    row = pl.BlockSpec((1, tokens, heads, width), lambda b, h, i: (b, tile(i), h, 0))
    operands = [x, d_output, weight, before]
    specs = [
        row,
        row,
        pl.BlockSpec((taps, heads, width), lambda b, h, i: (0, h, 0)),
        pl.BlockSpec((1, 1, taps - 1, heads, width), lambda b, h, i: (b, tile(i), 0, h, 0)),
    ]
    if kinds is not None:
        operands.append(kinds)
        specs.append(_kinds_spec(tokens, tile))
    bytes_accessed = (
        3 * x.size * x.dtype.itemsize
        + before.size * before.dtype.itemsize
        + 4 * weight.size * _fetches(grid)
        + (0 if kinds is None else 4 * kinds.size * grid[1])
        + 4 * batch * (2 * taps - 1) * num_heads * width
    )
    d_x, d_weight, d_state = pl.pallas_call(
        functools.partial(_backward_kernel, has_kinds=kinds is not None, num_tiles=num_tiles),
        grid=grid,
        in_specs=specs,
        out_specs=[
            row,
            pl.BlockSpec((1, taps, heads, width), lambda b, h, i: (b, 0, h, 0)),
            pl.BlockSpec((1, taps - 1, heads, width), lambda b, h, i: (b, 0, h, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((batch, taps, num_heads, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, taps - 1, num_heads, width), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((tokens, heads, width), jnp.float32),
            pltpu.VMEM((taps - 1, heads, width), jnp.float32),
            pltpu.VMEM((taps - 1, heads, width), jnp.float32),
        ],
        compiler_params=_compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=(6 * taps + 8) * x.size, transcendentals=x.size, bytes_accessed=bytes_accessed
        ),
        name="short_conv_backward",
    )(*operands)
    return d_x, jnp.sum(d_weight, axis=0), d_state


short_conv = differentiable(_forward, _backward)
