"""The short convolution on Hopper GPUs: a walk over tokens with the window in registers.

A block of threads copies some tokens of some heads into shared memory, goes over them in the order
of time, and copies the results, which take the place of the inputs, back. It knows the W-1 inputs
before its tile and, for the gradient, the W-1 tokens of the segment that follow it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.short_conv.tokens import (
    ABSENT,
    CONTINUES,
    STARTS,
    differentiable,
    inputs_before,
    tokens_after,
    unsupported,
)
from pallas_kernels.tiles import choose_tiles

__all__ = ["GPUTiles", "short_conv", "unsupported"]

_GROUP = 8  # tokens worked on without conditions where all continue their segment
_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


@dataclasses.dataclass(frozen=True)
class GPUTiles:
    """Tokens, and heads at most, per block of threads."""

    forward_tokens: int = 64
    forward_heads: int = 4
    backward_tokens: int = 64
    backward_heads: int = 2


def _sizes(x, tokens: int, heads: int):
    """Tokens and heads per block, and where the tiles start: the last one may overlap the former.

    Copies of a whole tile cannot end past the row; tokens of two tiles are computed twice.
    """
    length, num_heads = x.shape[1:3]
    tokens = min(tokens, length)
    heads = next(h for h in range(min(heads, num_heads), 0, -1) if num_heads % h == 0)
    starts = np.minimum(np.arange(0, length, tokens), length - tokens)
    return tokens, heads, starts


def _walk(tokens: int, kind_of, plain, conditional, carry):
    """Visit the tokens of a tile in order.

    Args:
        tokens: number of them.
        kind_of: token -> its kind; None when all continue.
        plain: (tokens, carry) -> carry for a list of tokens that continue their segment.
        conditional: (token, kind, carry) -> carry.
        carry: pytree.
    """

    def visit(first, size, carry):
        group = [first + n for n in range(size)]
        if kind_of is None:
            return plain(group, carry)
        continues = kind_of(group[0]) == CONTINUES
        for token in group[1:]:
            continues &= kind_of(token) == CONTINUES

        def one_by_one(carry):
            return lax.fori_loop(
                0, size, lambda n, c: conditional(first + n, kind_of(first + n), c), carry
            )

        return lax.cond(continues, lambda c: plain(group, c), one_by_one, carry)

    whole = tokens // _GROUP
    carry = lax.fori_loop(0, whole, lambda n, c: visit(n * _GROUP, _GROUP, c), carry)
    return visit(whole * _GROUP, tokens % _GROUP, carry) if tokens % _GROUP else carry


def _weighted(weight, inputs):  # W x [heads, K] each
    return sum(w * value for w, value in zip(weight, inputs, strict=True))


def _sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def _float(x):
    return x.astype(jnp.float32)


def _restart(kind, window):
    return lax.cond(
        kind == STARTS, lambda *w: [jnp.zeros_like(v) for v in w], lambda *w: list(w), *window
    )


def _forward(x, weight, kinds, initial_state):
    tiles = choose_tiles("short_conv_gpu", GPUTiles())
    tokens, heads, starts = _sizes(x, tiles.forward_tokens, tiles.forward_heads)
    batch, length, num_heads, width = x.shape
    taps = weight.shape[0]
    before = inputs_before(x, kinds, initial_state, starts, taps - 1)

    def body(*refs, tile, weights, history, arrived):
        x_ref, weight_ref, before_ref, *kinds_refs, output_ref = refs
        row, head, number = (lax.axis_index(name) for name in ("row", "head", "tile"))
        start = jnp.minimum(number * tokens, length - tokens)
        own_heads = pl.ds(head * heads, heads)
        place = (row, pl.ds(start, tokens), own_heads)
        plgpu.copy_gmem_to_smem(x_ref.at[place], tile, arrived)
        plgpu.copy_gmem_to_smem(weight_ref.at[:, own_heads], weights, arrived)
        plgpu.copy_gmem_to_smem(before_ref.at[row, number, :, own_heads], history, arrived)
        plgpu.barrier_wait(arrived)
        weight = [weights[n] for n in range(taps)]

        def plain(group, window):
            for token in group:
                inputs = [*window, _float(tile[token])]
                total = _weighted(weight, inputs)
                tile[token] = (total * _sigmoid(total)).astype(tile.dtype)
                window = inputs[1:]
            return window

        def absent(token, window):
            tile[token] = jnp.zeros((heads, width), tile.dtype)
            return window

        def conditional(token, kind, window):
            return lax.cond(
                kind == ABSENT,
                lambda *window: absent(token, list(window)),
                lambda *window: plain([token], list(window)),
                *_restart(kind, window),
            )

        kind_of = None
        if kinds_refs:
            kind_of = lambda token: kinds_refs[0][row, start + token]  # noqa: E731
        _walk(tokens, kind_of, plain, conditional, [_float(history[n]) for n in range(taps - 1)])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, output_ref.at[place])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types={
            "tile": plgpu.SMEM((tokens, heads, width), x.dtype),
            "weights": plgpu.SMEM((taps, heads, width), jnp.float32),
            "history": plgpu.SMEM((taps - 1, heads, width), x.dtype),
            "arrived": plgpu.Barrier(num_arrivals=3),
        },
        grid=(batch, num_heads // heads, len(starts)),
        grid_names=("row", "head", "tile"),
        compiler_params=_PARAMETERS,
        kernel_name="short_conv_forward",
    )
    return kernel(x, weight, before, *([] if kinds is None else [kinds]))


def _backward(x, weight, kinds, initial_state, d_output):
    """Gradients in one walk: that of an input is complete W-1 tokens later and written then.

    The inputs before the tile stand in rows behind it and get gradients like the others; for the
    first tile of a row they are the gradient of the initial state. A last row takes what belongs to
    no token.
    """
    tiles = choose_tiles("short_conv_gpu", GPUTiles())
    tokens, heads, starts = _sizes(x, tiles.backward_tokens, tiles.backward_heads)
    batch, length, num_heads, width = x.shape
    num = weight.shape[0] - 1
    nowhere = tokens + num
    before = inputs_before(x, kinds, initial_state, starts, num)
    after, exists = tokens_after((x, d_output), kinds, starts + tokens, num)

    def body(*refs, tile, d_tile, following, d_following, weights, arrived):
        x_ref, d_output_ref, weight_ref, before_ref, after_ref, d_after_ref, exists_ref = refs[:7]
        *kinds_refs, d_x_ref, d_weight_ref, d_state_ref = refs[7:]
        row, head, number = (lax.axis_index(name) for name in ("row", "head", "tile"))
        start = jnp.minimum(number * tokens, length - tokens)
        own_heads = pl.ds(head * heads, heads)
        place, around = (
            (row, pl.ds(start, tokens), own_heads),
            (row, number, slice(None), own_heads),
        )
        for source, target in (
            (x_ref.at[place], tile.at[pl.ds(0, tokens)]),
            (before_ref.at[around], tile.at[pl.ds(tokens, num)]),
            (d_output_ref.at[place], d_tile),
            (after_ref.at[around], following),
            (d_after_ref.at[around], d_following),
            (weight_ref.at[:, own_heads], weights),
        ):
            plgpu.copy_gmem_to_smem(source, target, arrived)
        plgpu.barrier_wait(arrived)
        weight = [weights[n] for n in range(num + 1)]
        zeros = jnp.zeros((heads, width), jnp.float32)

        def d_total_of(inputs, d_output):
            total = _weighted(weight, inputs)
            gate = _sigmoid(total)
            return d_output * gate * (1 + total * (1 - gate))

        def complete(d_total, position, recent, positions):
            """Add a token, or none (d_total 0), after the last; write the gradient of the first."""
            d_totals = [*recent, d_total]
            tile[positions[0]] = _weighted(weight[::-1], d_totals).astype(tile.dtype)
            return d_totals[1:], [*positions[1:], jnp.int32(position)]

        def plain(group, carry):
            window, recent, positions, d_weight = carry
            for token in group:
                inputs = [*window, _float(tile[token])]
                d_total = d_total_of(inputs, _float(d_tile[token]))
                recent, positions = complete(d_total, token, recent, positions)
                if length % tokens:  # tokens that the tile before has counted
                    is_counted = start + token >= number * tokens
                    d_total = lax.cond(is_counted, lambda d: d, jnp.zeros_like, d_total)
                d_weight = [d + d_total * v for d, v in zip(d_weight, inputs, strict=True)]
                window = inputs[1:]
            return window, recent, positions, d_weight

        def restart(carry):
            _, recent, positions, d_weight = carry
            for _ in range(num):
                recent, positions = complete(zeros, nowhere, recent, positions)
            return [zeros] * num, recent, positions, d_weight

        def absent(token, carry):
            tile[token] = jnp.zeros((heads, width), tile.dtype)
            return carry

        def conditional(token, kind, carry):
            carry = lax.cond(kind == STARTS, restart, lambda carry: carry, carry)
            return lax.cond(
                kind == ABSENT,
                lambda carry: absent(token, carry),
                lambda carry: plain([token], carry),
                carry,
            )

        kind_of = None
        if kinds_refs:
            kind_of = lambda token: kinds_refs[0][row, start + token]  # noqa: E731
        history = [_float(tile[tokens + n]) for n in range(num)]
        positions = [jnp.int32(tokens + n) for n in range(num)]
        carry = (history, [zeros] * num, positions, [zeros] * (num + 1))
        window, recent, positions, d_weight = _walk(tokens, kind_of, plain, conditional, carry)
        for n in range(num):
            inputs = [*window, _float(following[n])]
            d_total = lax.cond(
                exists_ref[row, number, n] != 0,
                lambda *inputs, n=n: d_total_of(inputs, _float(d_following[n])),
                lambda *inputs: zeros,
                *inputs,
            )
            recent, positions = complete(d_total, nowhere, recent, positions)
            window = inputs[1:]
        for n in range(num + 1):
            weights[n] = d_weight[n]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, tokens)], d_x_ref.at[place])
        plgpu.copy_smem_to_gmem(weights, d_weight_ref.at[around])

        @pl.when(number == 0)
        def _():
            plgpu.copy_smem_to_gmem(tile.at[pl.ds(tokens, num)], d_state_ref.at[row, :, own_heads])

        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((batch, len(starts), num + 1, num_heads, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, num, num_heads, width), x.dtype),
        ],
        scratch_types={
            "tile": plgpu.SMEM((nowhere + 1, heads, width), x.dtype),
            "d_tile": plgpu.SMEM((tokens, heads, width), x.dtype),
            "following": plgpu.SMEM((num, heads, width), x.dtype),
            "d_following": plgpu.SMEM((num, heads, width), x.dtype),
            "weights": plgpu.SMEM((num + 1, heads, width), jnp.float32),
            "arrived": plgpu.Barrier(num_arrivals=6),
        },
        grid=(batch, num_heads // heads, len(starts)),
        grid_names=("row", "head", "tile"),
        compiler_params=_PARAMETERS,
        kernel_name="short_conv_backward",
    )
    d_x, d_weight, d_state = kernel(
        x, d_output, weight, before, *after, exists, *([] if kinds is None else [kinds])
    )
    return d_x, jnp.sum(d_weight, axis=(0, 1)), d_state


short_conv = differentiable(_forward, _backward)
