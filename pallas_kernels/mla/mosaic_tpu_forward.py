"""Flash attention on TPU, forward: one tile of queries of a head group per grid step.

The keys and values of the group stay in fast memory while its queries pass (in spans where they
are too long), so that from the main memory each operand comes once; within a step a loop visits
the tiles of keys from the first that any segment reaches to the last that causality admits.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.mosaic_tpu_call import Spans, attention_call
from pallas_kernels.mla.mosaic_tpu_loops import each_key_tile
from pallas_kernels.mla.mosaic_tpu_plan import LANES, LOG2_E, Plan, keys_end, passage, widest
from pallas_kernels.mla.mosaic_tpu_tile import (
    as_column,
    as_row,
    keep_real,
    of_head,
    product,
    store_heads,
    visible,
    where_visible,
    widen,
)

# Below every score; finite, so that differences of maxima are never NaN.
_LOWEST = -1e30


def forward(plan: Plan, q, k, v, ids, offset) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return output [B, T, H*V], log2-sum [B, H, 1, T] and, if asked for, row maxima like it.

    Args:
        plan: the call.
        q: queries [B, T, H*K].
        k: keys [B, S, H*K].
        v: values [B, S, H*V].
        ids: None, or ids of queries [B, T] and keys [B, S].
        offset: position of the first query [B].
    """
    run = passage(plan, "mla_attention_forward", over_keys=True)
    rows = jax.ShapeDtypeStruct((plan.batch, plan.heads, 1, plan.num_queries), jnp.float32)
    output = jax.ShapeDtypeStruct((*q.shape[:2], v.shape[2]), plan.options.output_dtype)
    key, value = (widest(plan.windows(w)) for w in (plan.key_width, plan.value_width))
    results = attention_call(
        _kernel,
        "mla_attention_forward",
        run,
        held=[(q, plan.key_width)],
        passing=[(k, plan.key_width), (v, plan.value_width)],
        ids=ids,
        offset=offset,
        out=[(output, plan.value_width)],
        out_rows=[rows] * (1 + plan.options.return_max),
        scratch=[
            pltpu.VMEM((plan.group, run.num_q, key), q.dtype),
            pltpu.VMEM((plan.group, run.num_q, LANES), jnp.float32),
            pltpu.VMEM((plan.group, run.num_q, LANES), jnp.float32),
            pltpu.VMEM((plan.group, run.num_q, value), jnp.float32),
        ],
        multiplied=plan.key_width + plan.value_width,
    )
    return (*results, None)[:3]


def _kernel(spans: Spans, ranges_ref, offset_ref, *refs):
    run, plan = spans.run, spans.run.plan
    q_ref, k_ref, v_ref, *refs = refs
    q_ids_ref, k_ids_ref, *refs = refs if plan.has_ids else (None, None, *refs)
    out_ref, log_sum_ref, *max_ref, queries, peak_ref, total_ref, sum_ref = refs
    batch, i, span = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    offset = offset_ref[batch]
    key_windows, value_windows = plan.windows(plan.key_width), plan.windows(plan.value_width)
    factor = plan.options.scale * LOG2_E

    @pl.when(span == 0)
    def _():
        for head, window in enumerate(key_windows):
            queries[head, :, : window.width] = of_head(q_ref[0], window)
        peak_ref[...] = jnp.full_like(peak_ref, _LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    q_ids = None if q_ids_ref is None else as_column(q_ids_ref[0])
    seen_end = keys_end(plan, offset, 0, plan.num_queries)
    may_hold_garbage = plan.has_ids or plan.num_keys % run.num_k or not plan.sees_all_keys_at_last

    def visit(j, masked: bool):
        row = pl.multiple_of((j - span * spans.tiles) * run.num_k, run.num_k)
        keys, values = (ref[0, pl.ds(row, run.num_k)] for ref in (k_ref, v_ref))
        k_ids = None if k_ids_ref is None else k_ids_ref[0, :, pl.ds(row, run.num_k)]
        sees = visible(run, i, j, offset, q_ids, k_ids) if masked else None
        if masked and may_hold_garbage:
            column = None if k_ids is None else as_column(k_ids)
            values = keep_real(values, j * run.num_k, seen_end, column)
        for head, (key, value) in enumerate(zip(key_windows, value_windows, strict=True)):
            scores = product(queries[head, :, : key.width], keys[:, key.start : key.stop], (1, 1))
            scores = where_visible(sees, scores * factor, -jnp.inf)
            old_peak = peak_ref[head]
            peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp2(scores - widen(peak, run.num_k))
            shrink = jnp.exp2(old_peak - peak)
            peak_ref[head] = peak
            # Each lane sums its own column of weights; lanes are summed at the end.
            total_ref[head] = total_ref[head] * shrink + sum(
                weights[:, start : start + LANES] for start in range(0, run.num_k, LANES)
            )
            part = product(weights, values[:, value.start : value.stop], (1, 0))
            sum_ref[head, :, : value.width] = (
                sum_ref[head, :, : value.width] * widen(shrink, value.width) + part
            )

    each_key_tile(spans, ranges_ref, offset, batch, i, span, visit)

    @pl.when(span == spans.count - 1)
    def _():
        parts = []
        for head, value in enumerate(value_windows):
            total = jnp.sum(total_ref[head], axis=1, keepdims=True)
            total = jnp.broadcast_to(total, total_ref.shape[1:])
            sees_any = total > 0
            total = jnp.where(sees_any, total, 1)
            inverse = jnp.where(sees_any, 1 / total, 0)
            parts.append(sum_ref[head, :, : value.width] * widen(inverse, value.width))
            # +inf turns every weight of a query that sees nothing into 0 in the backward pass.
            log_sum = jnp.where(sees_any, peak_ref[head] + jnp.log2(total), jnp.inf)
            log_sum_ref[0, head] = as_row(log_sum)
            for ref in max_ref:
                ref[0, head] = as_row(jnp.where(sees_any, peak_ref[head], -jnp.inf))
        store_heads(out_ref, parts, value_windows)
