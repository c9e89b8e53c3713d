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

from pallas_kernels.attention_residual.rows import LANES, SLOTS, differentiable, unsupported
from pallas_kernels.tiles import choose_tiles

__all__ = ["Tiles", "attention_residual", "unsupported"]

_GROUP = 16  # tokens worked on at once: one packed bfloat16 register
_CHUNK = 256  # channels worked on at once: few enough for all values to stay in registers


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tokens per tile; halved while a pass would need more vector memory than `vmem_bytes`."""

    forward_tokens: int = 128
    backward_tokens: int = 64
    vmem_bytes: int = 40 * 2**20


def _fit(tokens: int, length: int, bytes_per_token: int, budget: int) -> int:
    """Tokens per tile: at most `tokens`, no more than there are, within the budget."""
    tokens = min(tokens, pl.cdiv(length, _GROUP) * _GROUP)
    while tokens > _GROUP and tokens * bytes_per_token > budget:
        tokens = tokens // 2 // _GROUP * _GROUP
    return tokens


def _call(body, count, *, grid, in_specs, out_specs, scratch_shapes, **options):
    """`pallas_call` whose body and index maps get the count first: an int, or read from memory."""
    known = isinstance(count, int)

    def spec(block_spec):
        def index_map(b, i, j, *prefetched):
            return block_spec.index_map(count if known else prefetched[0][0], b, i, j)

        return pl.BlockSpec(block_spec.block_shape, index_map)

    def kernel(*refs):
        if known:
            body(count, *refs)
        else:
            body(refs[0][0], *refs[1:])

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=0 if known else 1,
        grid=grid,
        in_specs=[spec(s) for s in in_specs],
        out_specs=[spec(s) for s in out_specs],
        scratch_shapes=scratch_shapes,
    )
    call = pl.pallas_call(kernel, grid_spec=grid_spec, **options)
    return call if known else functools.partial(call, count.reshape(1))


def _bank_spec(tokens: int, width: int) -> pl.BlockSpec:
    """Entry j of the bank; past the last one the block stays, so that nothing is fetched."""

    def index(count, b, i, j):
        last = count - 1
        if isinstance(count, int):
            return jnp.minimum(j, last), b, i, 0
        # Without any entry one block in all is fetched, and not used.
        none = last < 0
        return jnp.clip(j, 0, jnp.maximum(last, 0)), *(jnp.where(none, 0, x) for x in (b, i)), 0

    return pl.BlockSpec((1, 1, tokens, width), index)


def _row_spec(tokens: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, tokens, width), lambda count, b, i, j: (b, i, 0))


def _query_spec(width: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, width), lambda count, b, i, j: (0, 0))


def _in_groups(tokens: int, work) -> None:
    """work(rows) for each group of tokens of a tile."""

    def step(g, _):
        work(pl.ds(pl.multiple_of(g * _GROUP, _GROUP), _GROUP))
        return 0

    jax.lax.fori_loop(0, tokens // _GROUP, step, 0)


def _chunks(width: int) -> list:
    """Slices of `_CHUNK` channels, the last one shorter where D is no multiple of it."""
    return [pl.ds(start, min(_CHUNK, width - start)) for start in range(0, width, _CHUNK)]


def _sums(width: int, *terms) -> list[jax.Array]:
    """Sum over the channels of each term(channels) [group, chunk], as columns [group, 1]."""
    totals = [[] for _ in terms]  # independent sums, one per `LANES` channels of a chunk
    for channels in _chunks(width):
        for term, total in zip(terms, totals, strict=True):
            part = term(channels)
            for n, start in enumerate(range(0, part.shape[1], LANES)):
                lanes = part[:, start : start + LANES]
                if n < len(total):
                    total[n] += lanes
                else:
                    total.append(lanes)
    return [jnp.sum(sum(total), axis=-1, keepdims=True) for total in totals]


def _lanes(rows: int = _GROUP) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)


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
        squares, products = _sums(
            width,
            lambda channels: jnp.square(row(channels)),
            lambda channels: row(channels) * query_ref[:, channels],
        )
        inverse_norm = jax.lax.rsqrt(squares / width + eps)
        return products * inverse_norm, inverse_norm

    def kept(slot, of_score, of_norm, others):
        lane = _lanes()
        others = jnp.where((lane == slot) | (lane == SLOTS + slot), of_score, others)
        return jnp.where(lane == 2 * SLOTS + slot, of_norm, others)

    @pl.when(entry == 0)
    def start():
        def work(rows):
            of_score, of_norm = score(lambda c: current_ref[0, rows, c].astype(jnp.float32))
            for c in _chunks(width):
                sum_ref[rows, c] = current_ref[0, rows, c].astype(jnp.float32)
            maximum_ref[rows, :] = jnp.broadcast_to(of_score, (_GROUP, LANES))
            total_ref[rows, :] = jnp.ones((_GROUP, LANES), jnp.float32)
            statistics_ref[0, rows, :] = kept(
                num_entries, of_score, of_norm, jnp.zeros((_GROUP, LANES), jnp.float32)
            )

        _in_groups(tokens, work)

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
            statistics_ref[0, rows, :] = kept(
                entry, of_score, of_norm, statistics_ref[0, rows, :]
            )

        def add(rows):
            shrink, weight = shrink_ref[rows, :1], weight_ref[rows, :1]
            for c in _chunks(width):
                value = bank_ref[0, 0, rows, c].astype(jnp.float32)
                sum_ref[rows, c] = sum_ref[rows, c] * shrink + value * weight

        # One after the other: values kept from the first to the second would not fit registers.
        _in_groups(tokens, weigh)
        _in_groups(tokens, add)

    @pl.when(entry == num_steps - 1)
    def finish():
        def work(rows):
            lane, total = _lanes(), total_ref[rows, :]
            inverse_total = 1 / total[:, :1]
            for c in _chunks(width):
                mixed_ref[0, rows, c] = (sum_ref[rows, c] * inverse_total).astype(mixed_ref.dtype)
            statistics = statistics_ref[0, rows, :]
            exists = (lane < count) | (lane == num_entries)
            scores = jnp.where(exists, statistics, maximum_ref[rows, :])
            probabilities = jnp.exp(scores - maximum_ref[rows, :]) / total
            statistics_ref[0, rows, :] = jnp.where(
                lane < SLOTS, jnp.where(exists, probabilities, 0), statistics
            )

        _in_groups(tokens, work)


def _forward(bank, current, query, count, eps):
    num_entries, batch, length, width = bank.shape
    most = count if isinstance(count, int) else num_entries
    tiles, size = choose_tiles("attention_residual", Tiles()), current.dtype.itemsize
    per_token = width * (6 * size + 4) + 6 * LANES * 4
    tokens = _fit(tiles.forward_tokens, length, per_token, tiles.vmem_bytes)
    num_elements = batch * length * width
    cost = pl.CostEstimate(
        flops=8 * (most + 1) * num_elements,
        transcendentals=3 * (most + 1) * batch * length,
        bytes_accessed=num_elements * size * (most + 2) + 4 * (width + batch * length * LANES),
    )
    call = _call(
        functools.partial(_forward_kernel, num_entries=num_entries, num_steps=most, eps=eps),
        count,
        grid=(batch, pl.cdiv(length, tokens), most),
        in_specs=[_bank_spec(tokens, width), _row_spec(tokens, width), _query_spec(width)],
        out_specs=[_row_spec(tokens, width), _row_spec(tokens, LANES)],
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
            vmem_limit_bytes=tokens * per_token + _WORKSPACE,
        ),
        cost_estimate=cost,
        name="attention_residual_forward",
    )
    return call(bank, current, query[None])


_WORKSPACE = 8 * 2**20  # what the compiler puts into vector memory on its own


# --- backward ------------------------------------------------------------------------------------


def _backward_kernel(
    count, bank_ref, current_ref, query_ref, statistics_ref, d_mixed_ref, d_probabilities_ref,
    d_bank_ref, d_current_ref, d_query_ref,  # outputs
    rows_ref,  # bank entries of this tile [reads, tokens, D]
    along_ref,  # product of each row with the gradient of the mixture [tokens, 128]
    columns_ref,  # coefficients of d_mixed, query and the row itself in each row's gradient
    d_query_sum_ref,  # [8, D]
    *, num_entries, num_reads, length,
):  # fmt: skip
    step = pl.program_id(2)
    tokens, width = d_current_ref.shape[1:]
    remaining = length - pl.program_id(1) * tokens

    def real(rows):  # [tokens, 1]: rows of a last, partial tile hold anything
        first = jax.lax.broadcasted_iota(jnp.int32, (_GROUP, 1), 0)
        return first + rows.start < remaining

    def clean(rows, value):
        return value if length % tokens == 0 else jnp.where(real(rows), value, 0)

    def project(rows, row, slot, others):  # row(channels) [group, chunk]
        def product(c):
            return row(c).astype(jnp.float32) * d_mixed_ref[0, rows, c].astype(jnp.float32)

        return jnp.where(_lanes() == slot, *_sums(width, product), others)

    @pl.when(step == 0)
    def start():
        d_query_sum_ref[...] = jnp.zeros_like(d_query_sum_ref)

        def work(rows):
            nothing = jnp.zeros((_GROUP, LANES), jnp.float32)
            along_ref[rows, :] = project(
                rows, lambda c: current_ref[0, rows, c], num_entries, nothing
            )

        _in_groups(tokens, work)

    @pl.when(step < jnp.minimum(count, num_reads))
    def read():
        def work(rows):
            def row(c):
                value = rows_ref[step, rows, c] = bank_ref[0, 0, rows, c]
                return value

            along_ref[rows, :] = project(rows, row, step, along_ref[rows, :])

        _in_groups(tokens, work)

    def d_row(rows, row, slot, store):
        """Store the gradient of one row; add up its part in the gradient of the query."""
        columns, lane = columns_ref[rows, :], _lanes()
        of_mixture, of_query, of_row = (
            jnp.sum(jnp.where(lane == n * SLOTS + slot, columns, 0), axis=-1, keepdims=True)
            for n in range(3)
        )
        for c in _chunks(width):
            value = clean(rows, row(c).astype(jnp.float32))
            d_query = of_query * value
            d_query_sum_ref[:, c] += sum(d_query[n : n + 8] for n in range(0, _GROUP, 8))
            d_mixed = d_mixed_ref[0, rows, c].astype(jnp.float32)
            store(c, of_mixture * d_mixed + of_query * query_ref[:, c] + of_row * value)

    @pl.when(step == num_reads)
    def turn():
        def work(rows):
            statistics, lane = statistics_ref[0, rows, :], _lanes()
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

        _in_groups(tokens, work)

    entry = step - num_reads

    @pl.when((entry >= 0) & (entry < count))
    def write():
        def work(rows):
            def store(c, gradient):
                d_bank_ref[0, 0, rows, c] = gradient.astype(d_bank_ref.dtype)

            d_row(rows, lambda c: rows_ref[entry, rows, c], entry, store)

        _in_groups(tokens, work)

    @pl.when(entry >= count)
    def write_nothing():
        d_bank_ref[...] = jnp.zeros_like(d_bank_ref)

    @pl.when(entry == num_entries - 1)
    def finish():
        d_query_ref[0, 0] = jnp.sum(d_query_sum_ref[...], axis=0, keepdims=True)


def _backward(bank, current, query, count, statistics, d_mixed, d_probabilities):
    num_entries, batch, length, width = bank.shape
    reads = count if isinstance(count, int) else num_entries
    tiles, size = choose_tiles("attention_residual", Tiles()), current.dtype.itemsize
    per_token = width * size * (reads + 10) + 6 * LANES * 4
    tokens = _fit(tiles.backward_tokens, length, per_token, tiles.vmem_bytes)
    num_tiles, num_elements = pl.cdiv(length, tokens), batch * length * width
    cost = pl.CostEstimate(
        flops=14 * (reads + 1) * num_elements,
        transcendentals=0,
        bytes_accessed=num_elements * size * (reads + num_entries + 3)
        + 4 * (width * (1 + batch * num_tiles) + 2 * batch * length * LANES),
    )
    call = _call(
        functools.partial(
            _backward_kernel, num_entries=num_entries, num_reads=reads, length=length
        ),
        count,
        grid=(batch, num_tiles, reads + num_entries),
        in_specs=[
            _bank_spec(tokens, width),
            _row_spec(tokens, width),
            _query_spec(width),
            _row_spec(tokens, LANES),
            _row_spec(tokens, width),
            _row_spec(tokens, LANES),
        ],
        out_specs=[
            pl.BlockSpec(
                (1, 1, tokens, width),
                lambda count, b, i, j: (jnp.maximum(j - reads, 0), b, i, 0),
            ),
            _row_spec(tokens, width),
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
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tokens * per_token + _WORKSPACE,
        ),
        cost_estimate=cost,
        name="attention_residual_backward",
    )
    d_bank, d_current, d_query = call(
        bank, current, query[None], statistics, d_mixed, d_probabilities
    )
    return d_bank, d_current, jnp.sum(d_query, axis=(0, 1, 2))


attention_residual = differentiable(_forward, _backward)
