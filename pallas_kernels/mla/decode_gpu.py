"""Latent decoding on Hopper: 64 rows of queries and heads against a span of one row's pages.

Two warpgroups share the tile of tokens that a third fetches through a ring, page by page of the
block table. Each computes the weights of all tokens, and the output of one half of the channels:
sums of all channels would not fit in the registers of one. Short batches are split over spans of
tokens, whose outputs are merged afterwards.
"""

import dataclasses
import functools
import inspect
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interpret import interpreted_platform
from pallas_kernels.mla.mosaic_gpu_ring import Ring
from pallas_kernels.mla.mosaic_gpu_tile import (
    GROUPS,
    LOG2_E,
    LOWEST,
    ROWS,
    add_product,
    over_rows,
    product,
)
from pallas_kernels.tiles import choose_tiles

# Layouts of registers are given here: one tile in shared memory is read plain and transposed,
# which the search for layouts of the other semantics does not end with.
_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
_MATRIX = plgpu.Layout.WGMMA
# Channels of one swizzled row of shared memory.
_CHANNELS = 64
# Channels of queries and of two tiles of 64 tokens that shared memory holds.
_MOST_CHANNELS = 576
_MOST_VALUES = 512


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Tokens of a tile, tiles in flight, and programs that spans make where rows are too few."""

    tokens: int = 64
    stages: int = 2
    programs: int = 132


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call without its arrays; hashable."""

    factor: float
    num_queries: int
    heads: int
    width: int
    value_width: int
    num_pages: int
    page_size: int
    max_pages: int
    num_spans: int


def unsupported(
    q_latent: jax.Array, pages: jax.Array, value_width: int, output_dtype: jnp.dtype
) -> str | None:
    """Say why the kernel does not take these arguments, or None."""
    if not q_latent.dtype == pages.dtype == jnp.bfloat16:
        return f"q_latent is {q_latent.dtype} and pages are {pages.dtype}; both must be bfloat16"
    if output_dtype not in (jnp.float32, jnp.bfloat16):
        return f"output_dtype={output_dtype} is neither float32 nor bfloat16"
    width, page_size = q_latent.shape[3], pages.shape[1]
    if width % _CHANNELS or width > _MOST_CHANNELS:
        return f"q_latent has {width} channels; expected a multiple of 64 up to {_MOST_CHANNELS}"
    if value_width % (GROUPS * _CHANNELS) or value_width > _MOST_VALUES:
        return f"value_width={value_width} is not a multiple of 128 up to {_MOST_VALUES}"
    if page_size not in (8, 16, 32) and page_size % 64:
        return f"page_size={page_size} is neither 8, 16 or 32 nor a multiple of 64"
    return None


def mla_decode(
    q_latent: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    lengths: jax.Array,
    scale: float,
    value_width: int,
    output_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.mla_decode`."""
    batch, num_queries, heads, width = q_latent.shape
    num_pages, page_size, _ = pages.shape
    max_pages, rows = block_table.shape[1], num_queries * heads
    tiles = choose_tiles("mla_decode_gpu", DecodeTiles())
    num_blocks = -(-rows // ROWS)
    num_tiles = -(-max_pages * page_size // tiles.tokens)
    call = _Call(
        factor=scale * LOG2_E,
        num_queries=num_queries,
        heads=heads,
        width=width,
        value_width=value_width,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=max_pages,
        num_spans=max(1, min(tiles.programs // max(1, batch * num_blocks), num_tiles)),
    )
    queries = q_latent.reshape(batch, rows, width)
    queries = jnp.pad(queries, ((0, 0), (0, num_blocks * ROWS - rows), (0, 0)))
    tails = _tails(call, tiles.tokens, pages, block_table, lengths)
    output, log_sum = _decode(call, tiles, queries, pages, tails, block_table, lengths)
    if call.num_spans == 1:
        output, log_sum = output[:, 0], log_sum[:, 0]
    else:
        output, log_sum = _merge(output, log_sum)
    shape = (batch, num_queries, heads)
    output = output[:, :rows].reshape(*shape, value_width).astype(output_dtype)
    return output, log_sum[:, :rows].reshape(shape)


def _tails(call: _Call, tokens: int, pages, block_table, lengths):
    """Return the last tile of each row [B, tokens, C + R] with zeros past its length.

    A weight of 0 does not forgive what pages hold there, NaN for one, and registers for clearing it
    are not left inside the kernel.
    """
    first = jnp.maximum(lengths - 1, 0) // tokens * tokens
    positions = first[:, None] + jnp.arange(tokens)
    places = jnp.minimum(positions // call.page_size, call.max_pages - 1)
    used = jnp.clip(jnp.take_along_axis(block_table, places, axis=1), 0, call.num_pages - 1)
    rows = pages[used, positions % call.page_size, : call.width]
    return jnp.where((positions < lengths[:, None])[..., None], rows, 0)


def _merge(output, log_sum):
    """Merge outputs over spans [B, spans, rows, C] by their log-sums [B, spans, rows]."""
    total = jax.nn.logsumexp(log_sum, axis=1)
    finite = jnp.where(total == -jnp.inf, 0, total)
    shares = jnp.exp(log_sum - finite[:, None])
    return jnp.sum(output * shares[..., None], axis=1), total


def _decode(call: _Call, tiles: DecodeTiles, queries, pages, tails, block_table, lengths):
    """Return outputs of spans [B, spans, rows, C] and their log-sums, float32."""
    batch, rows, width = queries.shape
    shape = (batch, call.num_spans, rows)
    results = [
        jax.ShapeDtypeStruct((*shape, call.value_width), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    ]
    ring = Ring(name="page", tokens=tiles.tokens, stages=tiles.stages, wide={}, rows={})
    copies = max(1, tiles.tokens // call.page_size)
    scratch = {
        "q": _tile((1, ROWS, width), queries.dtype),
        "page": _tile((tiles.stages, tiles.tokens, width), pages.dtype),
        "log_sum": plgpu.SMEM((ROWS,), jnp.float32),
        "q_full": plgpu.Barrier(),
        **ring.barriers(copies),
    }
    operands = (queries, pages, tails, block_table, lengths)
    arguments = {}
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        pairs = batch * rows * call.max_pages * call.page_size
        blocks = rows // ROWS
        moved = blocks * math.prod((batch, call.max_pages, call.page_size, width))
        arguments["cost_estimate"] = pl.CostEstimate(
            flops=2 * pairs * (width + call.value_width),
            transcendentals=pairs,
            bytes_accessed=moved * pages.dtype.itemsize
            + sum(x.size * x.dtype.itemsize for x in (*operands, *results) if x is not pages),
        )
    return plgpu.kernel(
        functools.partial(_kernel, call, ring),
        out_type=results,
        scratch_types=scratch,
        # Programs that read the same pages are neighbours.
        grid=(rows // ROWS, call.num_spans, batch),
        grid_names=("block", "span", "batch"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=_PARAMS,
        kernel_name="mla_decode",
        **arguments,
    )(*operands)


def _tile(shape: tuple[int, ...], dtype):
    """Shared memory as the matrix unit reads it, plain or transposed."""
    if interpreted_platform() == "gpu":
        return plgpu.SMEM(shape, dtype)
    transforms = (plgpu.TilingTransform((8, _CHANNELS)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _kernel(
    call: _Call, ring: Ring, q_ref, pages_ref, tails_ref, table_ref, lengths_ref, out_ref,
    log_sum_ref, **scratch,
):  # fmt: skip
    block, span, batch, group = (
        lax.axis_index(name) for name in ("block", "span", "batch", "group")
    )
    length = lengths_ref[batch]
    num_tiles = lax.div(length + (ring.tokens - 1), ring.tokens)
    per_span = lax.div(num_tiles + (call.num_spans - 1), call.num_spans)
    start = span * per_span
    stop = jnp.minimum(start + per_span, num_tiles)
    own = pl.ds(block * ROWS, ROWS)

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        plgpu.copy_gmem_to_smem(q_ref.at[batch, own], scratch["q"].at[0], scratch["q_full"])
        whole = jnp.minimum(stop, num_tiles - 1)
        _fetch(call, ring, pages_ref, table_ref, tails_ref, batch, start, whole, stop, scratch)

    for half in range(GROUPS):  # slices of swizzled memory are static

        @pl.when(group == half)
        def _(half=half):
            plgpu.set_max_registers(240, action="increase")
            plgpu.barrier_wait(scratch["q_full"])
            channels = pl.ds(half * (call.value_width // GROUPS), call.value_width // GROUPS)
            output, total, peak = _attend(
                call, ring, channels, block * ROWS, length, start, stop, scratch
            )
            sees_any = total > 0
            total = lax.select(sees_any, total, jnp.ones_like(total))
            inverse = over_rows(1 / total, output.shape)
            out_ref[batch, span, own, channels] = output * inverse
            if half == 0:
                log_sum = peak * (1 / LOG2_E) + jnp.log(total)
                log_sum = lax.select(sees_any, log_sum, jnp.full_like(log_sum, -jnp.inf))
                scratch["log_sum"][...] = log_sum
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(scratch["log_sum"], log_sum_ref.at[batch, span, own])
                plgpu.wait_smem_to_gmem(0)


def _fetch(
    call: _Call, ring: Ring, pages_ref, table_ref, tails_ref, batch, start, whole, stop, scratch
):
    """Copy the tiles start..whole by the block table, and a last one, if any, from the tails."""
    part = min(ring.tokens, call.page_size)

    def put(tile, source):
        turn = tile - start
        ring.take(scratch, turn)
        slot = lax.rem(turn, ring.stages)
        for offset in range(0, ring.tokens, part):
            target = scratch["page"].at[slot, pl.ds(offset, part)]
            plgpu.copy_gmem_to_smem(source(tile, offset), target, scratch["page_full"].at[slot])

    def page(tile, offset):
        first = tile * ring.tokens + offset
        used = jnp.clip(table_ref[batch, lax.div(first, call.page_size)], 0, call.num_pages - 1)
        return pages_ref.at[used, pl.ds(lax.rem(first, call.page_size), part), pl.ds(0, call.width)]

    def tail(tile, offset):
        return tails_ref.at[batch, pl.ds(offset, part)]

    lax.fori_loop(start, whole, lambda tile, _: put(tile, page), None)
    lax.fori_loop(jnp.maximum(start, whole), stop, lambda tile, _: put(tile, tail), None)
    ring.drain(scratch, stop - start)


def _attend(call: _Call, ring: Ring, channels, first_row, length, start, stop, scratch):
    """Return sums of values [64, channels], sums of weights [64] and maxima [64] over tiles."""
    by_row = _MATRIX.reduce(1)
    last = length - 1 - start * ring.tokens  # the last token, counted from the first tile
    limit = last - (call.num_queries - 1)
    num_tiles = jnp.maximum(stop - start, 0)

    def step(turn, running, masked):
        output, total, peak = running
        slot = lax.rem(turn, ring.stages)
        ring.wait(scratch, slot)
        page = scratch["page"].at[slot]
        # Always 0, which the compiler does not know: it would keep the addresses of all parts of
        # the queries in registers from tile to tile, more than there are.
        queries = scratch["q"].at[jnp.minimum(last - turn, 0)]
        scores = product((queries, page), transposed=True) * call.factor
        if masked:
            scores = _keep_seen(call, scores, first_row, limit - turn * ring.tokens)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - over_rows(new_peak, scores.shape))
        shrink = jnp.exp2(peak - new_peak)
        total = total * shrink + jnp.sum(weights, axis=1)
        output = output * over_rows(shrink, output.shape)
        output = add_product(output, weights.astype(jnp.bfloat16), page.at[:, channels])
        ring.free(scratch, slot)
        return output, total, new_peak

    running = (
        _laid_out(jnp.zeros((ROWS, channels.size), jnp.float32), _MATRIX),
        _laid_out(jnp.zeros((ROWS,), jnp.float32), by_row),
        _laid_out(jnp.full((ROWS,), LOWEST, jnp.float32), by_row),
    )
    # Of these tiles every query sees all tokens.
    clear = jnp.minimum(lax.div(jnp.maximum(limit + 1, 0), ring.tokens), num_tiles)
    running = lax.fori_loop(0, clear, functools.partial(step, masked=False), running)
    return lax.fori_loop(clear, num_tiles, functools.partial(step, masked=True), running)


def _keep_seen(call: _Call, scores, first_row, limit):
    """Replace by -inf what a row does not see; the first query sees tokens 0..limit of the tile."""
    row = _iota(scores.shape, 0) + first_row
    for query in range(1, call.num_queries):  # row t*H is the first of query t
        limit = limit + (row >= query * call.heads).astype(jnp.int32)
    sees = _iota(scores.shape, 1) <= limit
    return lax.select(sees, scores, jnp.full_like(scores, -jnp.inf))


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    if interpreted_platform() == "gpu":
        return lax.broadcasted_iota(jnp.int32, shape, axis)
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_MATRIX)


def _laid_out(x: jax.Array, layout) -> jax.Array:
    """Say which thread holds what."""
    return x if interpreted_platform() == "gpu" else plgpu.layout_cast(x, layout)
