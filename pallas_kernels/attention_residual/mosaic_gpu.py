"""The depth mixture on Hopper GPUs: each row of the bank and the current sum is read once.

A block of threads takes some tokens. Their rows arrive one after the other in a ring of shared
memory, copied while earlier ones are worked on, across the tokens of the block. Forward: a running
softmax (maximum, sum, weighted sum of rows) over the rows of a token. Backward: all rows of a token
stay in the ring until the gradients of their scores are known.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_residual.rows import LANES, SLOTS, differentiable, unsupported
from pallas_kernels.tiles import choose_tiles

__all__ = ["GPUTiles", "attention_residual", "unsupported"]


@dataclasses.dataclass(frozen=True)
class GPUTiles:
    """Tokens per block of threads, and rows in the ring of the forward pass."""

    forward_tokens: int = 8
    forward_stages: int = 3
    backward_tokens: int = 64


_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def _forward(bank, current, query, count, most, eps):
    del most  # the loop ends at count
    num_entries, batch, length, width = bank.shape
    num_rows, row = batch * length, (width // LANES, LANES)  # copies take 256 numbers a dimension
    tiles = choose_tiles("attention_residual_gpu", GPUTiles())
    stages = tiles.forward_stages

    def body(count_ref, bank_ref, current_ref, query_ref, mixed_ref, statistics_ref, **scratch):
        rows_ref, query_row, mixed_row, statistics_row = (
            scratch[name] for name in ("rows", "query_row", "mixed_row", "statistics_row")
        )
        arrived, query_arrived = scratch["arrived"], scratch["query_arrived"]
        first = lax.axis_index("block") * tiles.forward_tokens
        per_token = count_ref[0] + 1
        num_tokens = jnp.minimum(tiles.forward_tokens, num_rows - first)
        num_steps = num_tokens * per_token
        lane = lax.broadcasted_iota(jnp.int32, (LANES,), 0)

        def fetch(step):
            token, entry = first + lax.div(step, per_token), lax.rem(step, per_token)
            slot = lax.rem(step, stages)

            @pl.when((step < num_steps) & (entry == 0))
            def _():
                plgpu.copy_gmem_to_smem(current_ref.at[token], rows_ref.at[slot], arrived.at[slot])

            @pl.when((step < num_steps) & (entry > 0))
            def _():
                plgpu.copy_gmem_to_smem(
                    bank_ref.at[entry - 1, token], rows_ref.at[slot], arrived.at[slot]
                )

        plgpu.copy_gmem_to_smem(query_ref, query_row, query_arrived)
        for step in range(stages):
            fetch(step)
        plgpu.barrier_wait(query_arrived)

        def per_row(token, entry, carry):
            maximum, total, mixed, statistics = carry
            step = token * per_token + entry
            slot = lax.rem(step, stages)
            plgpu.barrier_wait(arrived.at[slot])
            value = rows_ref[slot].astype(jnp.float32)
            inverse_norm = lax.rsqrt(jnp.sum(value * value) / width + eps)
            score = jnp.sum(value * query_row[...]) * inverse_norm
            plgpu.commit_smem()  # everyone has read the row
            fetch(step + stages)
            new_maximum = jnp.maximum(maximum, score)
            shrink, weight = jnp.exp(maximum - new_maximum), jnp.exp(score - new_maximum)
            mixed = mixed * shrink + value * weight
            index = jnp.where(entry == 0, num_entries, entry - 1)
            statistics = jnp.where((lane == index) | (lane == index + SLOTS), score, statistics)
            statistics = jnp.where(lane == index + 2 * SLOTS, inverse_norm, statistics)
            return new_maximum, total * shrink + weight, mixed, statistics

        def per_token_work(token, _):
            zeros = jnp.zeros(row, jnp.float32), jnp.zeros((LANES,), jnp.float32)
            carry = (jnp.float32(-1e30), jnp.float32(0), *zeros)
            maximum, total, mixed, statistics = lax.fori_loop(
                0, per_token, lambda entry, carry: per_row(token, entry, carry), carry
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            mixed_row[...] = (mixed * (1 / total)).astype(mixed_row.dtype)
            exists = (lane < per_token - 1) | (lane == num_entries)
            probabilities = jnp.exp(jnp.where(exists, statistics, maximum) - maximum) / total
            statistics = jnp.where(lane < SLOTS, jnp.where(exists, probabilities, 0), statistics)
            statistics_row[...] = statistics
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mixed_row, mixed_ref.at[first + token])
            plgpu.copy_smem_to_gmem(statistics_row, statistics_ref.at[first + token])
            return 0

        lax.fori_loop(0, num_tokens, per_token_work, 0)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((num_rows, *row), current.dtype),
            jax.ShapeDtypeStruct((num_rows, LANES), jnp.float32),
        ],
        scratch_types={
            "rows": plgpu.SMEM((stages, *row), current.dtype),
            "query_row": plgpu.SMEM(row, jnp.float32),
            "mixed_row": plgpu.SMEM(row, current.dtype),
            "statistics_row": plgpu.SMEM((LANES,), jnp.float32),
            "arrived": plgpu.Barrier(num_barriers=stages),
            "query_arrived": plgpu.Barrier(),
        },
        grid=(pl.cdiv(num_rows, tiles.forward_tokens),),
        grid_names=("block",),
        compiler_params=_PARAMETERS,
        kernel_name="attention_residual_forward",
    )
    mixed, statistics = kernel(
        jnp.asarray(count, jnp.int32).reshape(1),
        bank.reshape(num_entries, num_rows, *row),
        current.reshape(num_rows, *row),
        query.reshape(row),
    )
    return mixed.reshape(current.shape), statistics.reshape(batch, length, LANES)


# --- backward ------------------------------------------------------------------------------------

# Whether a kernel may change an array in place: not where it passes through a `custom_vmap` of jax
# that refuses mutable arrays (0.10).
_CAN_MUTATE = hasattr(plgpu, "force_gpu_interpret_mode")
_SHARED_BYTES = 220 * 1024  # of 227 KiB per block of threads; sums and barriers take some


def _ring(num_rows: int, row_bytes: int, other_bytes: int) -> tuple[bool, int]:
    """Whether all rows of a token fit shared memory, and the rows in the ring."""
    room = (_SHARED_BYTES - other_bytes) // row_bytes
    return num_rows <= room, min(num_rows + 1, room)


def _backward(
    bank, current, query, count, most, statistics, d_mixed, d_probabilities, d_bank_so_far
):  # fmt: skip
    num_entries, batch, length, width = bank.shape
    num_rows, row = batch * length, (width // LANES, LANES)
    tokens = choose_tiles("attention_residual_gpu", GPUTiles()).backward_tokens
    num_blocks, row_bytes = pl.cdiv(num_rows, tokens), width * current.dtype.itemsize
    # What does not fit is read a second time, most likely from the cache of the chip.
    most = count if isinstance(count, int) else most
    holds, stages = _ring(most + 1, row_bytes, 4 * row_bytes + 4 * width)
    accumulates = d_bank_so_far is not None and _CAN_MUTATE
    num_written = 0 if accumulates else num_entries + 1  # else as many rows as exist

    def body(
        count_ref, bank_ref, current_ref, query_ref, statistics_ref, d_mixed_ref,
        d_probabilities_ref, d_bank_ref, d_current_ref, d_query_ref,
        *, rows, query_row, d_mixed_row, statistics_row, d_probabilities_row, weighed, gradient,
        arrived, token_arrived, query_arrived, so_far_arrived,
    ):  # fmt: skip
        block = lax.axis_index("block")
        first = block * tokens
        per_token = count_ref[0] + 1
        num_fetches = per_token if holds else 2 * per_token
        num_tokens = jnp.minimum(tokens, num_rows - first)

        def fetch(step):
            token, entry = first + lax.div(step, num_fetches), lax.rem(step, num_fetches)
            entry = entry if holds else lax.rem(entry, per_token)
            slot, exists = lax.rem(step, stages), step < num_tokens * num_fetches

            @pl.when(exists & (entry == 0))
            def _():
                plgpu.copy_gmem_to_smem(current_ref.at[token], rows.at[slot], arrived.at[slot])

            @pl.when(exists & (entry > 0))
            def _():
                plgpu.copy_gmem_to_smem(
                    bank_ref.at[entry - 1, token], rows.at[slot], arrived.at[slot]
                )

        def fetch_token(token):
            slot = lax.rem(token, 2)
            pairs = ((d_mixed_ref, d_mixed_row), (statistics_ref, statistics_row),
                     (d_probabilities_ref, d_probabilities_row))  # fmt: skip

            @pl.when(token < num_tokens)
            def _():
                for source, target in pairs:
                    plgpu.copy_gmem_to_smem(
                        source.at[first + token], target.at[slot], token_arrived.at[slot]
                    )

        def slot_of(entry):  # in the packed statistics
            return jnp.where(entry == 0, num_entries, entry - 1)

        def project(token, entry, d_mixed, total):
            """Read a row; add its share of the sum that the softmax takes off all gradients."""
            step, slot, place = token * num_fetches + entry, slot_of(entry), lax.rem(token, 2)
            plgpu.barrier_wait(arrived.at[lax.rem(step, stages)])
            along = jnp.sum(rows[lax.rem(step, stages)].astype(jnp.float32) * d_mixed)
            if not holds:
                plgpu.commit_smem()  # everyone has read the row
                fetch(step + stages)
            part = statistics_row[place, slot] * (along + d_probabilities_row[place, slot])
            weighed[slot] = part
            return total + part

        def write(token, number, value, target, add=False):
            """Send one row of gradients on its way; two may be. Or add it to what is there."""
            place = lax.rem(token * jnp.maximum(per_token, num_written) + number, 2)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            if add:
                plgpu.copy_gmem_to_smem(target, gradient.at[place], so_far_arrived.at[place])
                plgpu.barrier_wait(so_far_arrived.at[place])
                value += gradient[place].astype(jnp.float32)
            gradient[place] = value.astype(gradient.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(gradient.at[place], target)

        def differentiate(token, entry, d_mixed, total, d_query):
            """Write the gradient of a row."""
            step, slot, place = token * num_fetches + entry, slot_of(entry), lax.rem(token, 2)
            step = step if holds else step + per_token
            if not holds:
                plgpu.barrier_wait(arrived.at[lax.rem(step, stages)])
            probability = statistics_row[place, slot]
            inverse_norm = statistics_row[place, slot + 2 * SLOTS]
            d_product = (weighed[slot] - probability * total) * inverse_norm
            of_row = -d_product * statistics_row[place, slot + SLOTS] * inverse_norm / width
            value = rows[lax.rem(step, stages)].astype(jnp.float32)
            d_row = probability * d_mixed + d_product * query_row[...] + of_row * value
            target = token + first

            @pl.when(entry == 0)
            def _():
                write(token, entry, d_row, d_current_ref.at[target])

            @pl.when(entry > 0)
            def _():
                d_row_of_bank = d_bank_ref.at[entry - 1, target]
                write(token, entry, d_row, d_row_of_bank, add=accumulates)

            fetch(step + stages)
            return d_query + d_product * value

        def per_token_work(token, d_query):
            plgpu.barrier_wait(token_arrived.at[lax.rem(token, 2)])
            d_mixed = d_mixed_row[lax.rem(token, 2)].astype(jnp.float32)
            total = lax.fori_loop(
                0, per_token, lambda n, total: project(token, n, d_mixed, total), jnp.float32(0)
            )
            d_query = lax.fori_loop(
                0, per_token,
                lambda n, d_query: differentiate(token, n, d_mixed, total, d_query), d_query,
            )  # fmt: skip

            def nothing(entry, _):
                zeros = jnp.zeros(row, jnp.float32)
                write(token, entry, zeros, d_bank_ref.at[entry - 1, first + token])
                return 0

            lax.fori_loop(per_token, jnp.maximum(per_token, num_written), nothing, 0)
            fetch_token(token + 2)
            return d_query

        plgpu.copy_gmem_to_smem(query_ref, query_row, query_arrived)
        fetch_token(0)
        fetch_token(1)
        for step in range(stages):
            fetch(step)
        plgpu.barrier_wait(query_arrived)
        d_query = lax.fori_loop(0, num_tokens, per_token_work, jnp.zeros(row, jnp.float32))
        query_row[...] = d_query
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(query_row, d_query_ref.at[block])
        plgpu.wait_smem_to_gmem(0)

    d_bank_type = jax.ShapeDtypeStruct((num_entries, num_rows, *row), bank.dtype)
    kernel = plgpu.kernel(
        body,
        out_type=[
            *([] if accumulates else [d_bank_type]),
            jax.ShapeDtypeStruct((num_rows, *row), current.dtype),
            jax.ShapeDtypeStruct((num_blocks, *row), jnp.float32),
        ],
        scratch_types={
            "rows": plgpu.SMEM((stages, *row), current.dtype),
            "query_row": plgpu.SMEM(row, jnp.float32),
            "d_mixed_row": plgpu.SMEM((2, *row), current.dtype),
            "statistics_row": plgpu.SMEM((2, LANES), jnp.float32),
            "d_probabilities_row": plgpu.SMEM((2, LANES), jnp.float32),
            "weighed": plgpu.SMEM((SLOTS,), jnp.float32),
            "gradient": plgpu.SMEM((2, *row), current.dtype),
            "arrived": plgpu.Barrier(num_barriers=stages),
            "token_arrived": plgpu.Barrier(num_arrivals=3, num_barriers=2),
            "query_arrived": plgpu.Barrier(),
            "so_far_arrived": plgpu.Barrier(num_barriers=2),
        },
        grid=(num_blocks,),
        grid_names=("block",),
        compiler_params=_PARAMETERS,
        kernel_name="attention_residual_backward",
    )
    operands = (
        jnp.asarray(count, jnp.int32).reshape(1),
        bank.reshape(num_entries, num_rows, *row),
        current.reshape(num_rows, *row),
        query.reshape(row),
        statistics.reshape(num_rows, LANES),
        d_mixed.reshape(num_rows, *row),
        d_probabilities.reshape(num_rows, LANES),
    )
    if accumulates:
        in_place = jax.new_ref(d_bank_so_far.reshape(d_bank_type.shape))
        d_current, d_query = kernel(*operands, in_place)
        d_bank = in_place[...]
    else:
        d_bank, d_current, d_query = kernel(*operands)
        if d_bank_so_far is not None:
            d_bank += d_bank_so_far.reshape(d_bank.shape)
    d_query = jnp.sum(d_query, axis=0).reshape(width)
    return d_bank.reshape(bank.shape), d_current.reshape(current.shape), d_query


attention_residual = differentiable(_forward, _backward)
