"""Flash attention on Hopper, forward: a block of 128 queries of one head per grid point.

Two warpgroups hold 64 queries each; a third fetches tiles of keys and values for both through a
ring of buffers. Blocks with most keys start first.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla.mosaic_gpu_ring import Ring, fetch
from pallas_kernels.mla.mosaic_gpu_tile import (
    GROUPS,
    LOWEST,
    PARAMS,
    ROWS,
    Call,
    add_product,
    keep_visible,
    over_rows,
    product,
)
from pallas_kernels.tiles import choose_tiles


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Keys of a tile, and tiles in flight."""

    keys: int = 128
    stages: int = 2


def forward_tiles(call: Call) -> ForwardTiles:
    """Return the tiles for the current device; smaller where the output needs room of its own."""
    tiles = choose_tiles("mla_attention_forward_gpu", ForwardTiles())
    if _shares_memory(call):
        return tiles
    return dataclasses.replace(tiles, keys=min(tiles.keys, 64))


def _shares_memory(call: Call) -> bool:
    """Whether the output leaves through the shared memory of the queries' first channels."""
    return call.value_width <= call.key_width and call.options.output_dtype == jnp.bfloat16


def _pieces(call: Call, name: str) -> dict[str, tuple[int, int]]:
    """Names of the pieces in which keys' channels lie: (first channel, number).

    The first is as wide as values where it can be, for the output must leave from one piece.
    """
    if call.key_width <= call.value_width:
        return {f"{name}0": (0, call.key_width)}
    return {
        f"{name}0": (0, call.value_width),
        f"{name}1": (call.value_width, call.key_width - call.value_width),
    }


def forward(call: Call, tiles: ForwardTiles, q, k, v, ids, offset, ranges):
    """Return output [B, T, H, V], log2-sum [B, H, T] and row maxima like it.

    Args:
        call: the call.
        tiles: from `forward_tiles`.
        q: queries [B, T, H, K], T a multiple of 128.
        k: keys [B, S, H, K], S a multiple of the tile.
        v: values [B, S, H, V].
        ids: None, or ids of queries [B, T] and keys [B, S].
        offset: position of the first query [B].
        ranges: for each block of queries the first tile of keys, and one past the last
            [2, B * blocks].
    """
    num_blocks = call.num_queries // (GROUPS * ROWS)
    rows = jax.ShapeDtypeStruct((call.batch, call.heads, call.num_queries), jnp.float32)
    output = jax.ShapeDtypeStruct((*q.shape[:3], call.value_width), call.options.output_dtype)
    ids_row = {"k_ids": jnp.int32} if call.has_ids else {}
    key_pieces = {name: width for name, (_, width) in _pieces(call, "k").items()}
    query_pieces = _pieces(call, "q")
    keys = Ring(name="k", tokens=tiles.keys, stages=tiles.stages, wide=key_pieces,
                rows=ids_row)  # fmt: skip
    values = Ring(name="v", tokens=tiles.keys, stages=tiles.stages, wide={"v": call.value_width},
                  rows={})  # fmt: skip
    scratch = {
        **{
            name: plgpu.SMEM((GROUPS, ROWS, width), q.dtype)
            for name, (_, width) in query_pieces.items()
        },
        "log_sum": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        "peak": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=len(query_pieces) + call.has_ids, num_barriers=GROUPS),
    }
    if call.has_ids:
        scratch["q_ids"] = plgpu.SMEM((GROUPS, ROWS), jnp.int32)
    if not _shares_memory(call):
        scratch["out"] = plgpu.SMEM((GROUPS, ROWS, call.value_width), output.dtype)
    return plgpu.kernel(
        functools.partial(_kernel, call, keys, values),
        out_type=[output, rows, rows],
        scratch_types=scratch | keys.scratch(k.dtype) | values.scratch(v.dtype),
        grid=(call.heads, num_blocks, call.batch),
        grid_names=("head", "block", "batch"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=PARAMS,
        kernel_name="mla_attention_forward",
    )(q, k, v, *(ids or ()), offset, ranges)


def _kernel(call: Call, keys: Ring, values: Ring, q_ref, k_ref, v_ref, *refs, **scratch):
    q_ids_ref, k_ids_ref, *refs = refs if call.has_ids else (None, None, *refs)
    offset_ref, ranges_ref, out_ref, log_sum_ref, peak_ref = refs
    head, batch, group = (lax.axis_index(name) for name in ("head", "batch", "group"))
    num_blocks = call.num_queries // (GROUPS * ROWS)
    block = num_blocks - 1 - lax.axis_index("block")
    place = batch * num_blocks + block
    start, stop = ranges_ref[0, place], ranges_ref[1, place]

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        sources = {
            name: k_ref.at[batch, :, head, pl.ds(first, width)]
            for name, (first, width) in _pieces(call, "k").items()
        }
        sources["v"] = v_ref.at[batch, :, head]
        if k_ids_ref is not None:
            sources["k_ids"] = k_ids_ref.at[batch]
        fetch((keys, values), scratch, sources, start, stop)

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        first = block * (GROUPS * ROWS) + group * ROWS
        own = pl.ds(first, ROWS)
        full = scratch["q_full"].at[group]
        queries = []
        for name, (channel, width) in _pieces(call, "q").items():
            queries.append(scratch[name].at[group])
            source = q_ref.at[batch, own, head, pl.ds(channel, width)]
            plgpu.copy_gmem_to_smem(source, queries[-1], full)
        if q_ids_ref is not None:
            plgpu.copy_gmem_to_smem(q_ids_ref.at[batch, own], scratch["q_ids"].at[group], full)
        plgpu.barrier_wait(full)
        q_ids = None if q_ids_ref is None else scratch["q_ids"][group]
        output, total, peak = _attend(
            call, keys, values, queries, q_ids, offset_ref[batch] + first, start, stop, scratch
        )
        sees_any = total > 0
        total = lax.select(sees_any, total, jnp.ones_like(total))
        # +inf turns every weight of a query that sees nothing into 0 in the backward pass.
        log_sum = lax.select(sees_any, peak + jnp.log2(total), jnp.full_like(peak, jnp.inf))
        scratch["log_sum"][group] = log_sum
        scratch["peak"][group] = lax.select(sees_any, peak, jnp.full_like(peak, -jnp.inf))
        staged = queries[0] if _shares_memory(call) else scratch["out"].at[group]
        staged[...] = (output / over_rows(total, output.shape)).astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out_ref.at[batch, own, head])
        plgpu.copy_smem_to_gmem(scratch["log_sum"].at[group], log_sum_ref.at[batch, head, own])
        plgpu.copy_smem_to_gmem(scratch["peak"].at[group], peak_ref.at[batch, head, own])
        plgpu.wait_smem_to_gmem(0)


def _attend(
    call: Call, keys: Ring, values: Ring, queries, q_ids, first_query, start, stop, scratch
):
    """Return sums of values [64, V], sums of weights [64] and maxima [64] over tiles of keys."""

    def step(tile, running, masked):
        output, total, peak = running
        slot = lax.rem(tile - start, keys.stages)
        keys.wait(scratch, slot)
        key_pieces = [scratch[name].at[slot] for name in _pieces(call, "k")]
        scores = product(*zip(queries, key_pieces, strict=True), transposed=True) * call.factor
        if masked:
            ids = None if q_ids is None else (q_ids, scratch["k_ids"][slot])
            scores = keep_visible(
                call, scores, -jnp.inf, first_query, tile * keys.tokens, ids, queries_axis=0
            )
        keys.free(scratch, slot)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - over_rows(new_peak, scores.shape))
        shrink = jnp.exp2(peak - new_peak)
        total = total * shrink + jnp.sum(weights, axis=1)
        output = output * over_rows(shrink, output.shape)
        values.wait(scratch, slot)
        output = add_product(output, weights.astype(jnp.bfloat16), scratch["v"].at[slot])
        values.free(scratch, slot)
        return output, total, new_peak

    running = (
        jnp.zeros((ROWS, call.value_width), jnp.float32),
        jnp.zeros((ROWS,), jnp.float32),
        jnp.full((ROWS,), LOWEST, jnp.float32),
    )
    clear = start
    if not call.has_ids:  # tiles of which every pair sees each other come first
        clear = stop
        if call.options.causal:
            clear = lax.div(jnp.maximum(first_query + 1, 0), keys.tokens)
            clear = jnp.maximum(jnp.minimum(clear, stop), start)
        running = lax.fori_loop(start, clear, functools.partial(step, masked=False), running)
    return lax.fori_loop(clear, stop, functools.partial(step, masked=True), running)
