"""Latent decoding on TPU: several pages of one row per grid step, all heads at once.

The block table is prefetched, and a page reaches fast memory by its entry, so that no gathered
copy of the cache exists. Pages past a row's length are not fetched.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.mosaic_tpu_plan import LANES, LOG2_E
from pallas_kernels.mla.mosaic_tpu_tile import keep_real, product
from pallas_kernels.mla.options import as_wide_as
from pallas_kernels.tiles import choose_tiles

# Entries of the block table that the scalar memory holds beside the compiler's own needs.
_MOST_ENTRIES = 1 << 17
_MOST_ROWS = 2048
# Below every score; finite, so that differences of maxima are never NaN.
_LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Tokens of one grid step, filled to whole pages."""

    tokens: int = 1024


def unsupported(
    q_latent: jax.Array, pages: jax.Array, block_table: jax.Array, output_dtype: jnp.dtype
) -> str | None:
    """Say why the kernel does not take these arguments, or None."""
    if q_latent.dtype not in (jnp.float32, jnp.bfloat16) or q_latent.dtype != pages.dtype:
        return (
            f"q_latent is {q_latent.dtype} and pages are {pages.dtype}; both must be float32 or "
            "both bfloat16"
        )
    if output_dtype not in (jnp.float32, jnp.bfloat16):
        return f"output_dtype={output_dtype} is neither float32 nor bfloat16"
    if pages.shape[1] % 8:
        return f"page_size={pages.shape[1]} is not a multiple of 8"
    if block_table.size > _MOST_ENTRIES:
        return f"block_table has {block_table.size} entries, more than {_MOST_ENTRIES}"
    if q_latent.shape[1] * q_latent.shape[2] > _MOST_ROWS:
        return f"T*H={q_latent.shape[1] * q_latent.shape[2]} exceeds {_MOST_ROWS}"
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
    q_latent = as_wide_as(q_latent, pages)
    batch, num_queries, heads, width = q_latent.shape
    num_pages, page_size, _ = pages.shape
    max_pages, rows = block_table.shape[1], num_queries * heads
    tiles = choose_tiles("mla_decode_tpu", DecodeTiles())
    per_step = min(-(-tiles.tokens // page_size), max_pages)
    steps = -(-max_pages // per_step)

    def page_index(slot, b, step, table, lengths):
        # Past the last page of the row a slot keeps the page it has.
        used = (lengths[b] + page_size - 1) // page_size
        last_step = jnp.maximum(used - 1 - slot, 0) // per_step
        place = jnp.minimum(jnp.minimum(step, last_step) * per_step + slot, max_pages - 1)
        return jnp.clip(table[b * max_pages + place], 0, num_pages - 1), 0, 0

    def row_block(lanes):
        return pl.BlockSpec((1, rows, lanes), lambda b, *_: (b, 0, 0))

    in_specs = [row_block(width)] + [
        pl.BlockSpec((1, page_size, width), functools.partial(page_index, slot))
        for slot in range(per_step)
    ]
    scratch = [
        pltpu.VMEM((rows, LANES), jnp.float32),
        pltpu.VMEM((rows, LANES), jnp.float32),
        pltpu.VMEM((rows, value_width), jnp.float32),
    ]
    itemsize = pages.dtype.itemsize
    fast_memory = 2 * math.prod((per_step * page_size + rows, width)) * itemsize
    fast_memory += 4 * rows * (2 * LANES + 3 * value_width + 6 * per_step * page_size)
    pairs = batch * rows * max_pages * page_size
    output, log_sum = pl.pallas_call(
        functools.partial(
            _kernel, scale * LOG2_E, num_queries, heads, value_width, per_step, page_size
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, rows, value_width), output_dtype),
            jax.ShapeDtypeStruct((batch, rows, 1), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, steps),
            in_specs=in_specs,
            out_specs=[row_block(value_width), row_block(1)],
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=max(fast_memory + (4 << 20), 16 << 20),
        ),
        # Of rows that fill their table; shorter ones cost less.
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (width + value_width),
            transcendentals=pairs,
            bytes_accessed=batch * max_pages * page_size * width * itemsize
            + batch * rows * (width * itemsize + value_width * output_dtype.itemsize + 4),
        ),
        name="mla_decode",
    )(
        block_table.reshape(-1),
        lengths,
        q_latent.reshape(batch, rows, width),
        *[pages] * per_step,
    )
    shape = (batch, num_queries, heads)
    return output.reshape(*shape, value_width), log_sum.reshape(shape)


def _kernel(
    factor, num_queries, heads, value_width, per_step, page_size, _, lengths_ref, q_ref, *refs
):
    page_refs, refs = refs[:per_step], refs[per_step:]
    out_ref, log_sum_ref, peak_ref, total_ref, sum_ref = refs
    row, step = pl.program_id(0), pl.program_id(1)
    length = lengths_ref[row]
    tokens, rows = per_step * page_size, num_queries * heads
    first = step * tokens

    @pl.when(step == 0)
    def _():
        peak_ref[...] = jnp.full_like(peak_ref, _LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def visit(masked: bool):
        latents = jnp.concatenate([ref[0] for ref in page_refs], axis=0)
        if masked:
            latents = keep_real(latents, first, length, None)
        scores = product(q_ref[0], latents, (1, 1)) * factor
        if masked:
            # Query t of T is row t*H; it sees one token more than query t-1.
            query = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
            seen = sum((query >= t * heads).astype(jnp.int32) for t in range(1, num_queries))
            position = first + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            scores = jnp.where(position <= length - num_queries + seen, scores, -jnp.inf)
        old_peak = peak_ref[...]
        peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - peak[:, :1])
        shrink = jnp.exp2(old_peak - peak)
        peak_ref[...] = peak
        total_ref[...] = total_ref[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        part = product(weights, latents[:, :value_width], (1, 0))
        sum_ref[...] = sum_ref[...] * shrink[:, :1] + part

    whole = first + tokens <= length - num_queries + 1
    pl.when(whole)(functools.partial(visit, masked=False))
    partly = jnp.logical_and(jnp.logical_not(whole), first < length)
    pl.when(partly)(functools.partial(visit, masked=True))

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        total = total_ref[...]
        sees_any = total > 0
        total = jnp.where(sees_any, total, 1)
        inverse = jnp.where(sees_any, 1 / total, 0)
        out_ref[0] = (sum_ref[...] * inverse[:, :1]).astype(out_ref.dtype)
        log_sum = (peak_ref[...] + jnp.log2(total)) / LOG2_E
        log_sum_ref[0] = jnp.where(sees_any, log_sum, -jnp.inf)[:, :1]
