"""Flash attention on Hopper, backward: one kernel for dk and dv, one for dq.

    weights = exp2(scores - log_sum)            d_scores = weights * (d_output v^T - share)
    d_v = weights^T d_output     d_k = scale * d_scores^T q     d_q = scale * d_scores k

`share` is the sum of output * d_output of each query. Both hold 64 rows per warpgroup (keys with
transposed scores, or queries) and run through the other side by the ring of the forward kernel.
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
    PARAMS,
    ROWS,
    Call,
    add_product,
    keep_visible,
    over_columns,
    over_rows,
    product,
)


@dataclasses.dataclass(frozen=True)
class KeyGradientTiles:
    """Queries of a tile, and tiles in flight, of the kernel that holds keys."""

    queries: int = 64
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class QueryGradientTiles:
    """Keys of a tile, and tiles in flight, of the kernel that holds queries."""

    keys: int = 64
    stages: int = 2


def key_gradients(
    call: Call, tiles: KeyGradientTiles, q, k, v, d_output, log_sum, share, ids, offset, ranges
) -> tuple[jax.Array, jax.Array]:
    """Return dk [B, S, H, K] and dv [B, S, H, V].

    Args:
        call: the call.
        tiles: sizes.
        q: queries [B, T, H, K], T a multiple of the tile.
        k: keys [B, S, H, K], S a multiple of 128.
        v: values [B, S, H, V].
        d_output: gradient of the output [B, T, H, V] in bfloat16.
        log_sum: log2 of the sum of exponentials [B, H, T].
        share: sum of output * d_output [B, H, T].
        ids: None, or ids of queries [B, T] and keys [B, S].
        offset: position of the first query [B].
        ranges: for each block of keys the first tile of queries, and one past the last
            [2, B * blocks].
    """
    widths = (call.key_width, call.value_width)
    positions = jnp.arange(call.num_queries, dtype=jnp.int32)
    ring = Ring(
        name="run",
        tokens=tiles.queries,
        stages=tiles.stages,
        wide={"q": call.key_width, "d_output": call.value_width},
        rows={"log_sum": jnp.float32, "share": jnp.float32, "positions": jnp.int32}
        | ({"run_ids": jnp.int32} if call.has_ids else {}),
    )
    return plgpu.kernel(
        functools.partial(_key_kernel, call, ring),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        scratch_types=_held(call, k.dtype, *widths) | ring.scratch(k.dtype),
        grid=(call.heads, call.num_keys // (GROUPS * ROWS), call.batch),
        grid_names=("head", "block", "batch"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=PARAMS,
        kernel_name="mla_attention_key_gradients",
    )(q, k, v, d_output, log_sum, share, positions, *(ids or ()), offset, ranges)


def _held(call: Call, dtype, *widths: int) -> dict:
    """Shared memory of the rows that a block holds, and the barrier of their arrival."""
    first, second = widths
    return {
        "first": plgpu.SMEM((GROUPS, ROWS, first), dtype),
        "second": plgpu.SMEM((GROUPS, ROWS, second), dtype),
        "held_full": plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),
    } | (
        {
            "held_ids": plgpu.SMEM((GROUPS, ROWS), jnp.int32),
            "held_ids_full": plgpu.Barrier(num_barriers=GROUPS),
        }
        if call.has_ids
        else {}
    )


def _fetch_held(scratch, group, first, second, ids):
    """Copy a warpgroup's own rows to shared memory; return them and their ids."""
    full = scratch["held_full"].at[group]
    plgpu.copy_gmem_to_smem(first, scratch["first"].at[group], full)
    plgpu.copy_gmem_to_smem(second, scratch["second"].at[group], full)
    plgpu.barrier_wait(full)
    held_ids = None
    if ids is not None:
        full = scratch["held_ids_full"].at[group]
        plgpu.copy_gmem_to_smem(ids, scratch["held_ids"].at[group], full)
        plgpu.barrier_wait(full)
        held_ids = scratch["held_ids"][group]
    return scratch["first"].at[group], scratch["second"].at[group], held_ids


def _store_held(scratch, group, first, second, first_ref, second_ref) -> None:
    """Write results as wide as the held rows, through the memory that those no longer need."""
    for name, value, ref in (("first", first, first_ref), ("second", second, second_ref)):
        if value is not None:
            scratch[name][group] = value.astype(ref.dtype)
    plgpu.commit_smem()
    for name, value, ref in (("first", first, first_ref), ("second", second, second_ref)):
        if value is not None:
            plgpu.copy_smem_to_gmem(scratch[name].at[group], ref)
    plgpu.wait_smem_to_gmem(0)


def _key_kernel(call: Call, ring: Ring, q_ref, k_ref, v_ref, d_out_ref, *refs, **scratch):
    log_sum_ref, share_ref, positions_ref, *refs = refs
    q_ids_ref, k_ids_ref, *refs = refs if call.has_ids else (None, None, *refs)
    offset_ref, ranges_ref, d_k_ref, d_v_ref = refs
    head, block, batch, group = (
        lax.axis_index(name) for name in ("head", "block", "batch", "group")
    )
    place = batch * (call.num_keys // (GROUPS * ROWS)) + block
    start, stop = ranges_ref[0, place], ranges_ref[1, place]

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        sources = {
            "q": q_ref.at[batch, :, head],
            "d_output": d_out_ref.at[batch, :, head],
            "log_sum": log_sum_ref.at[batch, head],
            "share": share_ref.at[batch, head],
            "positions": positions_ref,
        }
        if q_ids_ref is not None:
            sources["run_ids"] = q_ids_ref.at[batch]
        fetch((ring,), scratch, sources, start, stop)

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        first_key = block * (GROUPS * ROWS) + group * ROWS
        own = pl.ds(first_key, ROWS)
        keys, values, k_ids = _fetch_held(
            scratch,
            group,
            k_ref.at[batch, own, head],
            v_ref.at[batch, own, head],
            None if k_ids_ref is None else k_ids_ref.at[batch, own],
        )
        offset = offset_ref[batch]

        def step(tile, running):
            d_keys, d_values = running
            slot = lax.rem(tile - start, ring.stages)
            ring.wait(scratch, slot)
            queries, d_output = scratch["q"].at[slot], scratch["d_output"].at[slot]
            scores = product((keys, queries), transposed=True) * call.factor
            weights = jnp.exp2(scores - over_columns(scratch["log_sum"][slot], scores.shape))
            ids = None if k_ids is None else (k_ids, scratch["run_ids"][slot])
            positions = scratch["positions"][slot]
            weights = keep_visible(
                call, weights, 0.0, offset, first_key, ids, queries_axis=1, columns=positions
            )
            # Rounded here, the weights need half the registers from now on.
            weights = weights.astype(jnp.bfloat16)
            d_values = add_product(d_values, weights, d_output)
            # The sum starts at -share, so that the numbers of columns are not held beside it.
            share = over_columns(scratch["share"][slot], weights.shape)
            d_weights = add_product(-share, values, d_output, transposed=True)
            d_scores = weights.astype(jnp.float32) * d_weights
            d_keys = add_product(d_keys, d_scores.astype(jnp.bfloat16), queries)
            ring.free(scratch, slot)
            return d_keys, d_values

        running = tuple(
            jnp.zeros((ROWS, width), jnp.float32) for width in (call.key_width, call.value_width)
        )
        # Every tile is masked: a second loop for those that need none would spill registers.
        running = lax.fori_loop(start, stop, step, running)
        d_keys, d_values = running
        _store_held(
            scratch,
            group,
            d_keys * call.options.scale,
            d_values,
            d_k_ref.at[batch, own, head],
            d_v_ref.at[batch, own, head],
        )


def query_gradients(
    call: Call, tiles: QueryGradientTiles, q, k, v, d_output, log_sum, share, ids, offset, ranges
) -> jax.Array:
    """Return dq [B, T, H, K]; arguments as in `key_gradients`, but T is a multiple of 128, S of the
    tile, and `ranges` gives tiles of keys for each block of queries.
    """
    ring = Ring(
        name="run",
        tokens=tiles.keys,
        stages=tiles.stages,
        wide={"k": call.key_width, "v": call.value_width},
        rows={"run_ids": jnp.int32} if call.has_ids else {},
    )
    held = _held(call, q.dtype, call.key_width, call.value_width)
    held |= {
        "log_sum": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        "share": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        "rows_full": plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),
    }
    (d_q,) = plgpu.kernel(
        functools.partial(_query_kernel, call, ring),
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        scratch_types=held | ring.scratch(q.dtype),
        grid=(call.heads, call.num_queries // (GROUPS * ROWS), call.batch),
        grid_names=("head", "block", "batch"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=PARAMS,
        kernel_name="mla_attention_query_gradients",
    )(q, k, v, d_output, log_sum, share, *(ids or ()), offset, ranges)
    return d_q


def _query_kernel(call: Call, ring: Ring, q_ref, k_ref, v_ref, d_out_ref, *refs, **scratch):
    log_sum_ref, share_ref, *refs = refs
    q_ids_ref, k_ids_ref, *refs = refs if call.has_ids else (None, None, *refs)
    offset_ref, ranges_ref, d_q_ref = refs
    head, batch, group = (lax.axis_index(name) for name in ("head", "batch", "group"))
    num_blocks = call.num_queries // (GROUPS * ROWS)
    block = num_blocks - 1 - lax.axis_index("block")
    place = batch * num_blocks + block
    start, stop = ranges_ref[0, place], ranges_ref[1, place]

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        sources = {"k": k_ref.at[batch, :, head], "v": v_ref.at[batch, :, head]}
        if k_ids_ref is not None:
            sources["run_ids"] = k_ids_ref.at[batch]
        fetch((ring,), scratch, sources, start, stop)

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        first = block * (GROUPS * ROWS) + group * ROWS
        own = pl.ds(first, ROWS)
        full = scratch["rows_full"].at[group]
        plgpu.copy_gmem_to_smem(
            log_sum_ref.at[batch, head, own], scratch["log_sum"].at[group], full
        )
        plgpu.copy_gmem_to_smem(share_ref.at[batch, head, own], scratch["share"].at[group], full)
        plgpu.barrier_wait(full)
        log_sum, share = scratch["log_sum"][group], scratch["share"][group]
        queries, d_output, q_ids = _fetch_held(
            scratch,
            group,
            q_ref.at[batch, own, head],
            d_out_ref.at[batch, own, head],
            None if q_ids_ref is None else q_ids_ref.at[batch, own],
        )
        first_query = offset_ref[batch] + first

        def step(tile, d_queries, masked):
            slot = lax.rem(tile - start, ring.stages)
            ring.wait(scratch, slot)
            keys, values = scratch["k"].at[slot], scratch["v"].at[slot]
            scores = product((queries, keys), transposed=True) * call.factor
            weights = jnp.exp2(scores - over_rows(log_sum, scores.shape))
            if masked:
                ids = None if q_ids is None else (q_ids, scratch["run_ids"][slot])
                first_key = tile * ring.tokens
                weights = keep_visible(
                    call, weights, 0.0, first_query, first_key, ids, queries_axis=0
                )
            d_weights = product((d_output, values), transposed=True)
            d_scores = weights * (d_weights - over_rows(share, weights.shape))
            d_queries = add_product(d_queries, d_scores.astype(jnp.bfloat16), keys)
            ring.free(scratch, slot)
            return d_queries

        d_queries = jnp.zeros((ROWS, call.key_width), jnp.float32)
        clear = start
        if not call.has_ids:  # tiles of which every pair sees each other come first
            clear = stop
            if call.options.causal:
                clear = lax.div(jnp.maximum(first_query + 1, 0), ring.tokens)
                clear = jnp.maximum(jnp.minimum(clear, stop), start)
            d_queries = lax.fori_loop(
                start, clear, functools.partial(step, masked=False), d_queries
            )
        d_queries = lax.fori_loop(clear, stop, functools.partial(step, masked=True), d_queries)
        _store_held(
            scratch, group, d_queries * call.options.scale, None, d_q_ref.at[batch, own, head], None
        )
