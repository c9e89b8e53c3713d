"""The two phases of the depth mixture on Hopper GPUs.

First phase: a block of threads holds all rows of a token in shared memory and goes over the
queries, of which it reads one after the other. Second phase: one look at each current sum. Both are
differentiated as their forms in `jax.numpy` are.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_residual.rows import LANES, unsupported_row
from pallas_kernels.attention_residual.two_phase_gradients import block_with, merge_with
from pallas_kernels.tiles import choose_tiles


@dataclasses.dataclass(frozen=True)
class TwoPhaseGPUTiles:
    """Tokens per block of threads."""

    block_tokens: int = 8
    merge_tokens: int = 8


_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
_SHARED_BYTES = (
    220 * 1024
)  # of the 227 KiB of a block of threads; the rest is for sums and barriers
_LOWEST = -1e30  # stands for -inf, of which differences are not numbers


def unsupported(bank: jax.Array, queries: jax.Array) -> str | None:
    """Why the first phase does not take these arguments, or None."""
    num_entries, width = bank.shape[0], bank.shape[-1]
    needed = width * (num_entries * bank.dtype.itemsize + 8)
    if needed > _SHARED_BYTES or queries.shape[0] > LANES:
        return (
            f"bank has {num_entries} entries of D={width}, {needed >> 10} KiB per token, and "
            f"Q={queries.shape[0]}; {_SHARED_BYTES >> 10} KiB and {LANES} queries are supported"
        )
    return unsupported_row(bank)


def _rows(array: jax.Array, *leading: int) -> jax.Array:
    """Arrange rows [.., D] as [*leading, D / 128, 128]: copies take 256 numbers a dimension."""
    return array.reshape(*leading, array.shape[-1] // LANES, LANES)


# --- the bank, for several queries ---------------------------------------------------------------


def _block(bank, queries, count, eps):
    num_entries, batch, length, width = bank.shape
    num_queries, num_rows, row = queries.shape[0], batch * length, (width // LANES, LANES)
    tokens = choose_tiles("attention_residual_two_phase_gpu", TwoPhaseGPUTiles()).block_tokens

    def body(
        count_ref, bank_ref, queries_ref, weighted_ref, maximum_ref, total_ref,
        *, rows, query_row, weighted_row, maximum_row, total_row, inverse_norms, scores,
        arrived, query_arrived,
    ):  # fmt: skip
        first = lax.axis_index("block") * tokens
        count = count_ref[0]
        lane = lax.broadcasted_iota(jnp.int32, (LANES,), 0)

        def one_token(token, _):
            def fetch(entry, _):
                source = bank_ref.at[entry, first + token]
                plgpu.copy_gmem_to_smem(source, rows.at[entry], arrived.at[entry])
                return 0

            def measure(entry, _):
                plgpu.barrier_wait(arrived.at[entry])
                value = rows[entry].astype(jnp.float32)
                inverse_norms[entry] = lax.rsqrt(jnp.sum(value * value) / width + eps)
                return 0

            lax.fori_loop(0, count, fetch, 0)
            lax.fori_loop(0, count, measure, 0)

            def one_query(number, statistics):
                plgpu.copy_gmem_to_smem(queries_ref.at[number], query_row, query_arrived)
                plgpu.barrier_wait(query_arrived)
                query = query_row[...]

                def score(entry, maximum):
                    product = jnp.sum(rows[entry].astype(jnp.float32) * query)
                    scores[entry] = product * inverse_norms[entry]
                    return jnp.maximum(maximum, scores[entry])

                def add(entry, carry):
                    weighted, total = carry
                    weight = jnp.exp(scores[entry] - maximum)
                    weighted += rows[entry].astype(jnp.float32) * weight
                    return weighted, total + weight

                maximum = lax.fori_loop(0, count, score, jnp.float32(_LOWEST))
                weighted, total = lax.fori_loop(
                    0, count, add, (jnp.zeros(row, jnp.float32), jnp.float32(0))
                )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                weighted_row[...] = weighted
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(weighted_row, weighted_ref.at[number, first + token])
                maxima, totals = statistics
                return (
                    jnp.where(lane == number, maximum, maxima),
                    jnp.where(lane == number, total, totals),
                )

            zeros = jnp.zeros((LANES,), jnp.float32)
            maxima, totals = lax.fori_loop(0, num_queries, one_query, (zeros, zeros))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            maximum_row[...] = maxima
            total_row[...] = totals
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(maximum_row, maximum_ref.at[first + token])
            plgpu.copy_smem_to_gmem(total_row, total_ref.at[first + token])
            return 0

        lax.fori_loop(0, jnp.minimum(tokens, num_rows - first), one_token, 0)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((num_queries, num_rows, *row), jnp.float32),
            *[jax.ShapeDtypeStruct((num_rows, LANES), jnp.float32)] * 2,
        ],
        scratch_types={
            "rows": plgpu.SMEM((num_entries, *row), bank.dtype),
            "query_row": plgpu.SMEM(row, jnp.float32),
            "weighted_row": plgpu.SMEM(row, jnp.float32),
            "maximum_row": plgpu.SMEM((LANES,), jnp.float32),
            "total_row": plgpu.SMEM((LANES,), jnp.float32),
            "inverse_norms": plgpu.SMEM((LANES,), jnp.float32),
            "scores": plgpu.SMEM((LANES,), jnp.float32),
            "arrived": plgpu.Barrier(num_barriers=num_entries),
            "query_arrived": plgpu.Barrier(),
        },
        grid=(pl.cdiv(num_rows, tokens),),
        grid_names=("block",),
        compiler_params=_PARAMETERS,
        kernel_name="attention_residual_block",
    )
    weighted, maximum, total = kernel(
        jnp.asarray(count, jnp.int32).reshape(1),
        _rows(bank, num_entries, num_rows),
        _rows(queries, num_queries),
    )
    maximum, total = (
        jnp.moveaxis(x[:, :num_queries], -1, 0).reshape(num_queries, batch, length)
        for x in (maximum, total)
    )
    maximum = jnp.where(jnp.asarray(count) > 0, maximum, -jnp.inf)
    return weighted.reshape(num_queries, batch, length, width), maximum, total


def attention_residual_block(bank, queries, count, eps):
    """See `pallas_kernels.attention_residual_block`."""
    return block_with(_block, bank, queries, count, eps)


# --- the current sum, for one query --------------------------------------------------------------


def _merge(weighted, maximum, total, current, query, index, eps):
    batch, length, width = current.shape
    num_queries, num_rows, row = weighted.shape[0], batch * length, (width // LANES, LANES)
    tokens = choose_tiles("attention_residual_two_phase_gpu", TwoPhaseGPUTiles()).merge_tokens

    def body(
        index_ref, weighted_ref, maximum_ref, total_ref, current_ref, query_ref, mixed_ref,
        *, weighted_row, current_row, query_row, mixed_row, arrived, query_arrived,
    ):  # fmt: skip
        first = lax.axis_index("block") * tokens
        number, num_tokens = index_ref[0], jnp.minimum(tokens, num_rows - first)

        def fetch(token):
            place = lax.rem(token, 2)

            @pl.when(token < num_tokens)
            def _():
                source = weighted_ref.at[number, first + token]
                plgpu.copy_gmem_to_smem(source, weighted_row.at[place], arrived.at[place])
                source = current_ref.at[first + token]
                plgpu.copy_gmem_to_smem(source, current_row.at[place], arrived.at[place])

        def one_token(token, _):
            place = lax.rem(token, 2)
            plgpu.barrier_wait(arrived.at[place])
            value = current_row[place].astype(jnp.float32)
            inverse_norm = lax.rsqrt(jnp.sum(value * value) / width + eps)
            score = jnp.sum(value * query_row[...]) * inverse_norm
            before = jnp.maximum(maximum_ref[first + token], _LOWEST)
            maximum = jnp.maximum(before, score)
            shrink, weight = jnp.exp(before - maximum), jnp.exp(score - maximum)
            inverse_total = 1 / (total_ref[first + token] * shrink + weight)
            mixed = weighted_row[place] * (shrink * inverse_total) + value * (
                weight * inverse_total
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            mixed_row[...] = mixed.astype(mixed_row.dtype)
            plgpu.commit_smem()
            fetch(token + 2)
            plgpu.copy_smem_to_gmem(mixed_row, mixed_ref.at[first + token])
            return 0

        plgpu.copy_gmem_to_smem(query_ref, query_row, query_arrived)
        fetch(0)
        fetch(1)
        plgpu.barrier_wait(query_arrived)
        lax.fori_loop(0, num_tokens, one_token, 0)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, *row), current.dtype),
        scratch_types={
            "weighted_row": plgpu.SMEM((2, *row), jnp.float32),
            "current_row": plgpu.SMEM((2, *row), current.dtype),
            "query_row": plgpu.SMEM(row, jnp.float32),
            "mixed_row": plgpu.SMEM(row, current.dtype),
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            "query_arrived": plgpu.Barrier(),
        },
        grid=(pl.cdiv(num_rows, tokens),),
        grid_names=("block",),
        compiler_params=_PARAMETERS,
        kernel_name="attention_residual_merge",
    )
    mixed = kernel(
        jnp.asarray(index, jnp.int32).reshape(1),
        _rows(weighted, num_queries, num_rows),
        maximum.reshape(num_rows),
        total.reshape(num_rows),
        _rows(current, num_rows),
        _rows(query),
    )
    return mixed.reshape(current.shape)


def attention_residual_merge(weighted, index, maximum, total, current, query, eps):
    """See `pallas_kernels.attention_residual_merge`; weighted holds all queries."""
    return merge_with(_merge, weighted, index, maximum, total, current, query, eps)
