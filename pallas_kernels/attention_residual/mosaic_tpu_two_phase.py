"""The two phases of the depth mixture on TPU.

First phase: as the forward pass of the whole mixture, with a running softmax for each query; the
weighted sums stay in vector memory while the entries of a tile of tokens come by. Second phase: one
look at each current sum. Both are differentiated as their forms in `jax.numpy` are.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_residual.mosaic_tpu_blocks import (
    GROUP,
    WORKSPACE,
    bank_spec,
    call_with_count,
    channel_sums,
    chunks,
    fit_tokens,
    in_groups,
    lanes_of,
    query_spec,
    row_spec,
)
from pallas_kernels.attention_residual.rows import LANES, unsupported_row
from pallas_kernels.attention_residual.two_phase_gradients import block_with, merge_with
from pallas_kernels.tiles import choose_tiles


@dataclasses.dataclass(frozen=True)
class TwoPhaseTiles:
    """Tokens per tile; halved while a phase would need more vector memory than `vmem_bytes`."""

    block_tokens: int = 32
    merge_tokens: int = 128
    vmem_bytes: int = 40 * 2**20


def _bytes_per_token(bank: jax.Array, num_queries: int) -> int:
    return bank.shape[-1] * (2 * bank.dtype.itemsize + 8 * num_queries) + 16 * LANES


def unsupported(bank: jax.Array, queries: jax.Array) -> str | None:
    """Why the first phase does not take these arguments, or None."""
    needed = GROUP * _bytes_per_token(bank, queries.shape[0])
    budget = choose_tiles("attention_residual_two_phase_tpu", TwoPhaseTiles()).vmem_bytes
    if queries.shape[0] > LANES or needed > budget:
        return (
            f"Q={queries.shape[0]} queries of D={queries.shape[1]} take {needed >> 20} MiB; "
            f"{budget >> 20} MiB and {LANES} queries are supported"
        )
    return unsupported_row(bank)


# --- the bank, for several queries ---------------------------------------------------------------


def _block_kernel(
    count, bank_ref, queries_ref, weighted_ref, maximum_ref, total_ref, *, num_queries, eps
):
    entry = pl.program_id(2)
    tokens, width = bank_ref.shape[2:]

    @pl.when(entry == 0)
    def start():
        maximum_ref[...] = jnp.full_like(maximum_ref, -jnp.inf)
        total_ref[...] = jnp.zeros_like(total_ref)
        weighted_ref[...] = jnp.zeros_like(weighted_ref)

    @pl.when(entry < count)
    def merge():
        def work(rows):
            def row(c):
                return bank_ref[0, 0, rows, c].astype(jnp.float32)

            (squares,) = channel_sums(width, lambda c: jnp.square(row(c)))
            inverse_norm = jax.lax.rsqrt(squares / width + eps)

            def one_query(q, _):
                (products,) = channel_sums(width, lambda c: row(c) * queries_ref[pl.ds(q, 1), c])
                score, own = products * inverse_norm, lanes_of() == q
                before = maximum_ref[0, rows, :]
                maximum = jnp.maximum(before, score)
                shrink, weight = jnp.exp(before - maximum), jnp.exp(score - maximum)
                maximum_ref[0, rows, :] = jnp.where(own, maximum, before)
                total = total_ref[0, rows, :]
                total_ref[0, rows, :] = jnp.where(own, total * shrink + weight, total)
                shrink, weight = (
                    jnp.sum(jnp.where(own, x, 0), axis=-1, keepdims=True) for x in (shrink, weight)
                )
                for c in chunks(width):
                    added = weighted_ref[q, 0, rows, c] * shrink + row(c) * weight
                    weighted_ref[q, 0, rows, c] = added
                return 0

            jax.lax.fori_loop(0, num_queries, one_query, 0)

        in_groups(tokens, work)


def _block(bank, queries, count, eps):
    num_entries, batch, length, width = bank.shape
    most = count if isinstance(count, int) else num_entries
    num_queries, per_token = queries.shape[0], _bytes_per_token(bank, queries.shape[0])
    tiles = choose_tiles("attention_residual_two_phase_tpu", TwoPhaseTiles())
    tokens = fit_tokens(tiles.block_tokens, length, per_token, tiles.vmem_bytes)
    num_elements = batch * length * width
    call = call_with_count(
        functools.partial(_block_kernel, num_queries=num_queries, eps=eps),
        count,
        grid=(batch, pl.cdiv(length, tokens), most),
        in_specs=[
            bank_spec(tokens, width),
            pl.BlockSpec((num_queries, width), lambda count, b, i, j: (0, 0)),
        ],
        out_specs=[
            pl.BlockSpec((num_queries, 1, tokens, width), lambda count, b, i, j: (0, b, i, 0)),
            row_spec(tokens, LANES),
            row_spec(tokens, LANES),
        ],
        scratch_shapes=[],
        out_shape=[
            jax.ShapeDtypeStruct((num_queries, batch, length, width), jnp.float32),
            *[jax.ShapeDtypeStruct((batch, length, LANES), jnp.float32)] * 2,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tokens * per_token + 8 * num_queries * width + WORKSPACE,
        ),
        cost_estimate=pl.CostEstimate(
            flops=most * (2 + 5 * num_queries) * num_elements,
            transcendentals=most * (1 + 2 * num_queries) * batch * length,
            bytes_accessed=num_elements * (most * bank.dtype.itemsize + 4 * num_queries)
            + 4 * num_queries * width
            + 8 * batch * length * LANES,
        ),
        name="attention_residual_block",
    )
    weighted, maximum, total = call(bank, queries)
    return weighted, *(jnp.moveaxis(x[..., :num_queries], -1, 0) for x in (maximum, total))


def attention_residual_block(bank, queries, count, eps):
    """See `pallas_kernels.attention_residual_block`."""
    return block_with(_block, bank, queries, count, eps)


# --- the current sum, for one query --------------------------------------------------------------


def _merge_kernel(index, weighted_ref, softmax_ref, current_ref, query_ref, mixed_ref, *, eps):
    del index  # the block of `weighted` has been chosen by it
    tokens, width = current_ref.shape[1:]

    def work(rows):
        def row(c):
            return current_ref[0, rows, c].astype(jnp.float32)

        squares, products = channel_sums(
            width, lambda c: jnp.square(row(c)), lambda c: row(c) * query_ref[:, c]
        )
        score = products * jax.lax.rsqrt(squares / width + eps)
        before, total = softmax_ref[0, rows, :1], softmax_ref[0, rows, 1:2]
        maximum = jnp.maximum(before, score)
        shrink, weight = jnp.exp(before - maximum), jnp.exp(score - maximum)
        inverse_total = 1 / (total * shrink + weight)
        shrink, weight = shrink * inverse_total, weight * inverse_total
        for c in chunks(width):
            mixed = weighted_ref[0, 0, rows, c] * shrink + row(c) * weight
            mixed_ref[0, rows, c] = mixed.astype(mixed_ref.dtype)

    in_groups(tokens, work)


def _merge(weighted, maximum, total, current, query, index, eps):
    batch, length, width = current.shape
    tiles, size = (
        choose_tiles("attention_residual_two_phase_tpu", TwoPhaseTiles()),
        current.dtype.itemsize,
    )
    per_token = width * (8 + 4 * size) + 8 * LANES
    tokens = fit_tokens(tiles.merge_tokens, length, per_token, tiles.vmem_bytes)
    call = call_with_count(
        functools.partial(_merge_kernel, eps=eps),
        index,
        grid=(batch, pl.cdiv(length, tokens), 1),
        in_specs=[
            pl.BlockSpec((1, 1, tokens, width), lambda index, b, i, j: (index, b, i, 0)),
            row_spec(tokens, 2),
            row_spec(tokens, width),
            query_spec(width),
        ],
        out_specs=[row_spec(tokens, width)],
        scratch_shapes=[],
        out_shape=[jax.ShapeDtypeStruct(current.shape, current.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tokens * per_token + WORKSPACE,
        ),
        cost_estimate=pl.CostEstimate(
            flops=7 * current.size,
            transcendentals=3 * batch * length,
            bytes_accessed=current.size * (4 + 2 * size) + 4 * (width + 2 * batch * length),
        ),
        name="attention_residual_merge",
    )
    softmax = jnp.stack([maximum, total], axis=-1)  # [B, T, 2]
    return call(weighted, softmax, current, query[None])[0]


def attention_residual_merge(weighted, index, maximum, total, current, query, eps):
    """See `pallas_kernels.attention_residual_merge`; weighted holds all queries."""
    return merge_with(_merge, weighted, index, maximum, total, current, query, eps)
