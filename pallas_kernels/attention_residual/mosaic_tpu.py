"""The depth mixture on TPU: each row of the bank and the current sum is read once per direction.

Forward: the grid goes over tokens, and for each tile of tokens over the bank entries, merging one
after the other into a running softmax (maximum, sum, weighted sum of rows), so that only one entry
is in vector memory beside the sums. Backward: the gradient of a score needs the products of all
rows with the gradient of the mixture, so the rows of a tile stay in vector memory while the grid
first reads the entries and then writes their gradients.
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
from pallas_kernels.attention_residual.rows import LANES, SLOTS, differentiable, unsupported
from pallas_kernels.tiles import choose_tiles

__all__ = ["Tiles", "attention_residual", "unsupported"]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tokens per tile; halved while a pass would need more vector memory than `vmem_bytes`."""

    forward_tokens: int = 128
    backward_tokens: int = 64
    vmem_bytes: int = 40 * 2**20


# --- forward -------------------------------------------------------------------------------------


def _forward_kernel(
    count, bank_ref, current_ref, query_ref,  # inputs
    mixed_ref, statistics_ref,  # outputs
    sum_ref,  # weighted sum of rows [tokens, D]
    maximum_ref, total_ref, shrink_ref, weight_ref,  # of the softmax, in all lanes [tokens, 128]
    *, num_entries, num_steps, eps,
):  # fmt: skip
    entry = pl.program_id(2)
    tokens, width = sum_ref.shape

    def score(row):  # row(channels) -> score and inverse norm [group, 1] x 2
        squares, products = channel_sums(
            width,
            lambda channels: jnp.square(row(channels)),
            lambda channels: row(channels) * query_ref[:, channels],
        )
        inverse_norm = jax.lax.rsqrt(squares / width + eps)
        return products * inverse_norm, inverse_norm

    def kept(slot, of_score, of_norm, others):
        lane = lanes_of()
        others = jnp.where((lane == slot) | (lane == SLOTS + slot), of_score, others)
        return jnp.where(lane == 2 * SLOTS + slot, of_norm, others)

    @pl.when(entry == 0)
    def start():
        def work(rows):
            of_score, of_norm = score(lambda c: current_ref[0, rows, c].astype(jnp.float32))
            for c in chunks(width):
                sum_ref[rows, c] = current_ref[0, rows, c].astype(jnp.float32)
            maximum_ref[rows, :] = jnp.broadcast_to(of_score, (GROUP, LANES))
            total_ref[rows, :] = jnp.ones((GROUP, LANES), jnp.float32)
            statistics_ref[0, rows, :] = kept(
                num_entries, of_score, of_norm, jnp.zeros((GROUP, LANES), jnp.float32)
            )

        in_groups(tokens, work)

    @pl.when(entry < count)
    def merge():
        def weigh(rows):
            of_score, of_norm = score(lambda c: bank_ref[0, 0, rows, c].astype(jnp.float32))
            before = maximum_ref[rows, :]
            maximum = jnp.maximum(before, of_score)
            shrink, weight = jnp.exp(before - maximum), jnp.exp(of_score - maximum)
            maximum_ref[rows, :] = maximum
            total_ref[rows, :] = total_ref[rows, :] * shrink + weight
            shrink_ref[rows, :], weight_ref[rows, :] = shrink, weight
            statistics_ref[0, rows, :] = kept(entry, of_score, of_norm, statistics_ref[0, rows, :])

        def add(rows):
            shrink, weight = shrink_ref[rows, :1], weight_ref[rows, :1]
            for c in chunks(width):
                value = bank_ref[0, 0, rows, c].astype(jnp.float32)
                sum_ref[rows, c] = sum_ref[rows, c] * shrink + value * weight

        # One after the other: values kept from the first to the second would not fit registers.
        in_groups(tokens, weigh)
        in_groups(tokens, add)

    @pl.when(entry == num_steps - 1)
    def finish():
        def work(rows):
            lane, total = lanes_of(), total_ref[rows, :]
            inverse_total = 1 / total[:, :1]
            for c in chunks(width):
                mixed_ref[0, rows, c] = (sum_ref[rows, c] * inverse_total).astype(mixed_ref.dtype)
            statistics = statistics_ref[0, rows, :]
            exists = (lane < count) | (lane == num_entries)
            scores = jnp.where(exists, statistics, maximum_ref[rows, :])
            probabilities = jnp.exp(scores - maximum_ref[rows, :]) / total
            statistics_ref[0, rows, :] = jnp.where(
                lane < SLOTS, jnp.where(exists, probabilities, 0), statistics
            )

        in_groups(tokens, work)


def _forward(bank, current, query, count, most, eps):
    num_entries, batch, length, width = bank.shape
    most = count if isinstance(count, int) else most
    tiles, size = choose_tiles("attention_residual_tpu", Tiles()), current.dtype.itemsize
    per_token = width * (6 * size + 4) + 6 * LANES * 4
    tokens = fit_tokens(tiles.forward_tokens, length, per_token, tiles.vmem_bytes)
    num_elements = batch * length * width
    cost = pl.CostEstimate(
        flops=8 * (most + 1) * num_elements,
        transcendentals=3 * (most + 1) * batch * length,
        bytes_accessed=num_elements * size * (most + 2) + 4 * (width + batch * length * LANES),
    )
    call = call_with_count(
        functools.partial(_forward_kernel, num_entries=num_entries, num_steps=most, eps=eps),
        count,
        grid=(batch, pl.cdiv(length, tokens), most),
        in_specs=[bank_spec(tokens, width), row_spec(tokens, width), query_spec(width)],
        out_specs=[row_spec(tokens, width), row_spec(tokens, LANES)],
        scratch_shapes=[
            pltpu.VMEM((tokens, width), jnp.float32),
            *[pltpu.VMEM((tokens, LANES), jnp.float32)] * 4,
        ],
        out_shape=[
            jax.ShapeDtypeStruct(current.shape, current.dtype),
            jax.ShapeDtypeStruct((batch, length, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tokens * per_token + WORKSPACE,
        ),
        cost_estimate=cost,
        name="attention_residual_forward",
    )
    return call(bank, current, query[None])


# --- backward ------------------------------------------------------------------------------------


def _backward_kernel(count, *refs, num_entries, num_reads, length, accumulates):
    """Steps of the grid: one for each entry that is read, then one for each that is written."""
    refs = list(refs)
    bank_ref, current_ref, query_ref, statistics_ref, d_mixed_ref, d_probabilities_ref = refs[:6]
    so_far_ref = refs.pop(6) if accumulates else None
    d_bank_ref, d_current_ref, d_query_ref, *scratch = refs[6:]
    # Bank entries of this tile [reads, tokens, D]; products of rows with the gradient of the
    # mixture [tokens, 128]; coefficients of d_mixed, query and the row itself in the gradient of
    # each row [tokens, 128]; a sum [8, D].
    rows_ref, along_ref, columns_ref, d_query_sum_ref = scratch
    step = pl.program_id(2)
    tokens, width = d_current_ref.shape[1:]
    remaining = length - pl.program_id(1) * tokens

    def real(rows):  # [tokens, 1]: rows of a last, partial tile hold anything
        first = jax.lax.broadcasted_iota(jnp.int32, (GROUP, 1), 0)
        return first + rows.start < remaining

    def clean(rows, value):
        return value if length % tokens == 0 else jnp.where(real(rows), value, 0)

    def project(rows, row, slot, others):  # row(channels) [group, chunk]
        def product(c):
            return row(c).astype(jnp.float32) * d_mixed_ref[0, rows, c].astype(jnp.float32)

        return jnp.where(lanes_of() == slot, *channel_sums(width, product), others)

    @pl.when(step == 0)
    def start():
        d_query_sum_ref[...] = jnp.zeros_like(d_query_sum_ref)

        def work(rows):
            nothing = jnp.zeros((GROUP, LANES), jnp.float32)
            along_ref[rows, :] = project(
                rows, lambda c: current_ref[0, rows, c], num_entries, nothing
            )

        in_groups(tokens, work)

    @pl.when(step < jnp.minimum(count, num_reads))
    def read():
        def work(rows):
            def row(c):
                value = rows_ref[step, rows, c] = bank_ref[0, 0, rows, c]
                return value

            along_ref[rows, :] = project(rows, row, step, along_ref[rows, :])

        in_groups(tokens, work)

    def d_row(rows, row, slot, store):
        """Store the gradient of one row; add up its part in the gradient of the query."""
        columns, lane = columns_ref[rows, :], lanes_of()
        of_mixture, of_query, of_row = (
            jnp.sum(jnp.where(lane == n * SLOTS + slot, columns, 0), axis=-1, keepdims=True)
            for n in range(3)
        )
        for c in chunks(width):
            value = clean(rows, row(c).astype(jnp.float32))
            d_query = of_query * value
            d_query_sum_ref[:, c] += sum(d_query[n : n + 8] for n in range(0, GROUP, 8))
            d_mixed = d_mixed_ref[0, rows, c].astype(jnp.float32)
            store(c, of_mixture * d_mixed + of_query * query_ref[:, c] + of_row * value)

    @pl.when(step == num_reads)
    def turn():
        def work(rows):
            statistics, lane = statistics_ref[0, rows, :], lanes_of()
            probabilities = jnp.where(lane < SLOTS, statistics, 0)
            scores = pltpu.roll(statistics, LANES - SLOTS, 1)
            inverse_norms = pltpu.roll(statistics, LANES - 2 * SLOTS, 1)
            along = probabilities * (along_ref[rows, :] + d_probabilities_ref[0, rows, :])
            d_scores = along - probabilities * jnp.sum(along, axis=-1, keepdims=True)
            of_query = d_scores * inverse_norms
            of_row = -of_query * scores * inverse_norms / width
            of_query = pltpu.roll(of_query, SLOTS, 1)
            of_row = pltpu.roll(of_row, 2 * SLOTS, 1)
            columns = clean(rows, probabilities + of_query + of_row)
            columns_ref[rows, :] = columns

            def store(c, gradient):
                d_current_ref[0, rows, c] = gradient.astype(d_current_ref.dtype)

            d_row(rows, lambda c: current_ref[0, rows, c], num_entries, store)

        in_groups(tokens, work)

    entry = step - num_reads

    @pl.when((entry >= 0) & (entry < count))
    def write():
        def work(rows):
            def store(c, gradient):
                if accumulates:
                    gradient += so_far_ref[0, 0, rows, c].astype(jnp.float32)
                d_bank_ref[0, 0, rows, c] = gradient.astype(d_bank_ref.dtype)

            d_row(rows, lambda c: rows_ref[entry, rows, c], entry, store)

        in_groups(tokens, work)

    # Entries that do not exist: 0, or left as they are; without any one block is visited, too.
    @pl.when((entry == 0) & (count == 0) if accumulates else entry >= count)
    def write_nothing():
        d_bank_ref[...] = so_far_ref[...] if accumulates else jnp.zeros_like(d_bank_ref)

    @pl.when(step == pl.num_programs(2) - 1)
    def finish():
        d_query_ref[0, 0] = jnp.sum(d_query_sum_ref[...], axis=0, keepdims=True)


def _backward(
    bank, current, query, count, most, statistics, d_mixed, d_probabilities, d_bank_so_far
):  # fmt: skip
    num_entries, batch, length, width = bank.shape
    reads = count if isinstance(count, int) else most
    accumulates = d_bank_so_far is not None
    writes = reads if accumulates else num_entries
    tiles, size = choose_tiles("attention_residual_tpu", Tiles()), current.dtype.itemsize
    per_token = width * size * (reads + 12) + 6 * LANES * 4
    tokens = fit_tokens(tiles.backward_tokens, length, per_token, tiles.vmem_bytes)
    num_tiles, num_elements = pl.cdiv(length, tokens), batch * length * width
    row, columns = row_spec(tokens, width), row_spec(tokens, LANES)

    def written(count, b, i, j):
        last = jnp.maximum(count - 1, 0) if accumulates else num_entries - 1
        return jnp.clip(j - reads, 0, last), b, i, 0

    d_bank_spec = pl.BlockSpec((1, 1, tokens, width), written)
    operands = [bank, current, query[None], statistics, d_mixed, d_probabilities]
    in_specs = [bank_spec(tokens, width), row, query_spec(width), columns, row, columns]
    aliases = {}
    if accumulates:
        aliases = {len(operands) + (0 if isinstance(count, int) else 1): 0}
        operands.append(d_bank_so_far)
        in_specs.append(d_bank_spec)
    call = call_with_count(
        functools.partial(
            _backward_kernel,
            num_entries=num_entries, num_reads=reads, length=length, accumulates=accumulates,
        ),
        count,
        grid=(batch, num_tiles, reads + writes),
        in_specs=in_specs,
        out_specs=[
            d_bank_spec,
            row,
            pl.BlockSpec((1, 1, 1, width), lambda count, b, i, j: (b, i, 0, 0)),
        ],
        scratch_shapes=[
            pltpu.VMEM((reads, tokens, width), bank.dtype),
            pltpu.VMEM((tokens, LANES), jnp.float32),
            pltpu.VMEM((tokens, LANES), jnp.float32),
            pltpu.VMEM((8, width), jnp.float32),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(bank.shape, bank.dtype),
            jax.ShapeDtypeStruct(current.shape, current.dtype),
            jax.ShapeDtypeStruct((batch, num_tiles, 1, width), jnp.float32),
        ],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tokens * per_token + WORKSPACE,
        ),
        cost_estimate=pl.CostEstimate(
            flops=14 * (reads + 1) * num_elements,
            transcendentals=0,
            bytes_accessed=num_elements * size * (reads + writes * (2 if accumulates else 1) + 3)
            + 4 * (width * (1 + batch * num_tiles) + 2 * batch * length * LANES),
        ),
        name="attention_residual_backward",
    )  # fmt: skip
    d_bank, d_current, d_query = call(*operands)
    return d_bank, d_current, jnp.sum(d_query, axis=(0, 1, 2))


attention_residual = differentiable(_forward, _backward)
