"""Flash attention on TPU, backward: one kernel for dk and dv, one for dq.

    weights = exp2(scores - log_sum)            d_scores = weights * (d_output v^T - share)
    d_v = weights^T d_output     d_k = scale * d_scores^T q     d_q = scale * d_scores k

`share` is the sum of output * d_output of each query. The first kernel holds keys and runs through
queries on transposed tiles of scores, so that numbers of a query lie along lanes, as they are
stored; the second holds queries and runs through keys as the forward kernel does.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.mosaic_tpu_call import Spans, attention_call
from pallas_kernels.mla.mosaic_tpu_loops import each_key_tile, each_query_tile
from pallas_kernels.mla.mosaic_tpu_plan import LANES, LOG2_E, Plan, keys_end, passage, widest
from pallas_kernels.mla.mosaic_tpu_tile import (
    as_column,
    keep_real,
    of_head,
    product,
    store_heads,
    visible,
    where_visible,
    widen,
)


def key_gradients(plan: Plan, q, k, v, d_output, log_sum, share, ids, offset):
    """Return dk [B, S, H*K] and dv [B, S, H*V].

    Args:
        plan: the call.
        q: queries [B, T, H*K].
        k: keys [B, S, H*K].
        v: values [B, S, H*V].
        d_output: gradient of the output [B, T, H*V] in the dtype of q.
        log_sum: log2 of the sum of exponentials [B, H, 1, T].
        share: sum of output * d_output [B, H, 1, T].
        ids: None, or ids of queries [B, T] and keys [B, S].
        offset: position of the first query [B].
    """
    run = passage(plan, "mla_attention_key_gradients", over_keys=False)
    key, value = (widest(plan.windows(w)) for w in (plan.key_width, plan.value_width))
    return attention_call(
        _key_kernel,
        "mla_attention_key_gradients",
        run,
        held=[(k, plan.key_width), (v, plan.value_width)],
        passing=[(q, plan.key_width), (d_output, plan.value_width)],
        passing_rows=[log_sum, share],
        ids=ids,
        offset=offset,
        out=[
            (jax.ShapeDtypeStruct(k.shape, k.dtype), plan.key_width),
            (jax.ShapeDtypeStruct(v.shape, v.dtype), plan.value_width),
        ],
        scratch=[
            pltpu.VMEM((plan.group, run.num_k, key), k.dtype),
            pltpu.VMEM((plan.group, run.num_k, value), v.dtype),
            pltpu.VMEM((plan.group, run.num_k, key), jnp.float32),
            pltpu.VMEM((plan.group, run.num_k, value), jnp.float32),
        ],
        multiplied=2 * (plan.key_width + plan.value_width),
    )


def _key_kernel(spans: Spans, ranges_ref, offset_ref, *refs):
    run, plan = spans.run, spans.run.plan
    k_ref, v_ref, q_ref, d_out_ref, log_sum_ref, share_ref, *refs = refs
    q_ids_ref, k_ids_ref, *refs = refs if plan.has_ids else (None, None, *refs)
    d_k_ref, d_v_ref, keys, values, d_key_ref, d_value_ref = refs
    batch, j, span = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    offset = offset_ref[batch]
    windows = [*zip(plan.windows(plan.key_width), plan.windows(plan.value_width), strict=True)]
    factor = plan.options.scale * LOG2_E
    k_ids = None if k_ids_ref is None else as_column(k_ids_ref[0])

    @pl.when(span == 0)
    def _():
        # What no query sees may be NaN; its weight is 0, which a product does not forgive.
        seen_end = keys_end(plan, offset, 0, plan.num_queries)
        v_real = keep_real(v_ref[0], j * run.num_k, seen_end, k_ids)
        for head, (key, value) in enumerate(windows):
            keys[head, :, : key.width] = of_head(k_ref[0], key)
            values[head, :, : value.width] = of_head(v_real, value)
        d_key_ref[...] = jnp.zeros_like(d_key_ref)
        d_value_ref[...] = jnp.zeros_like(d_value_ref)

    def visit(i, masked: bool):
        row = pl.multiple_of((i - span * spans.tiles) * run.num_q, run.num_q)
        here = pl.ds(row, run.num_q)
        queries, d_output = q_ref[0, here], d_out_ref[0, here]
        q_ids = None if q_ids_ref is None else q_ids_ref[0, :, here]
        sees = visible(run, i, j, offset, q_ids, k_ids) if masked else None
        past_end = plan.num_queries % run.num_q != 0
        if masked and (plan.has_ids or past_end):
            column = None if q_ids is None else as_column(q_ids)
            queries, d_output = (
                keep_real(x, i * run.num_q, plan.num_queries, column) for x in (queries, d_output)
            )
        for head, (key, value) in enumerate(windows):
            q_head = queries[:, key.start : key.stop]
            d_head = d_output[:, value.start : value.stop]
            log_sum, share = log_sum_ref[0, head, :, here], share_ref[0, head, :, here]
            if masked and past_end:
                token = i * run.num_q + lax.broadcasted_iota(jnp.int32, share.shape, 1)
                share = jnp.where(token < plan.num_queries, share, 0)
            scores = product(keys[head, :, : key.width], q_head, (1, 1)) * factor
            weights = where_visible(sees, jnp.exp2(scores - log_sum), 0)
            d_value_ref[head, :, : value.width] += product(weights, d_head, (1, 0))
            d_weights = product(values[head, :, : value.width], d_head, (1, 1))
            d_scores = weights * (d_weights - share)
            d_key_ref[head, :, : key.width] += product(d_scores, q_head, (1, 0))

    each_query_tile(spans, ranges_ref, offset, batch, j, span, visit)

    @pl.when(span == spans.count - 1)
    def _():
        keys_of, values_of = zip(*windows, strict=True)
        d_keys = [d_key_ref[head, :, : w.width] for head, w in enumerate(keys_of)]
        d_values = [d_value_ref[head, :, : w.width] for head, w in enumerate(values_of)]
        store_heads(d_k_ref, [plan.options.scale * x for x in d_keys], keys_of)
        store_heads(d_v_ref, d_values, values_of)


def query_gradients(plan: Plan, q, k, v, d_output, log_sum, share, ids, offset) -> jax.Array:
    """Return dq [B, T, H*K]; arguments as in `key_gradients`."""
    run = passage(plan, "mla_attention_query_gradients", over_keys=True)
    key, value = (widest(plan.windows(w)) for w in (plan.key_width, plan.value_width))
    (d_q,) = attention_call(
        _query_kernel,
        "mla_attention_query_gradients",
        run,
        held=[(q, plan.key_width), (d_output, plan.value_width)],
        passing=[(k, plan.key_width), (v, plan.value_width)],
        held_rows=[log_sum, share],
        ids=ids,
        offset=offset,
        out=[(jax.ShapeDtypeStruct(q.shape, q.dtype), plan.key_width)],
        scratch=[
            pltpu.VMEM((plan.group, run.num_q, key), q.dtype),
            pltpu.VMEM((plan.group, run.num_q, value), q.dtype),
            pltpu.VMEM((plan.group, run.num_q, LANES), jnp.float32),
            pltpu.VMEM((plan.group, run.num_q, LANES), jnp.float32),
            pltpu.VMEM((plan.group, run.num_q, key), jnp.float32),
        ],
        multiplied=2 * plan.key_width + plan.value_width,
    )
    return d_q


def _query_kernel(spans: Spans, ranges_ref, offset_ref, *refs):
    run, plan = spans.run, spans.run.plan
    q_ref, d_out_ref, k_ref, v_ref, log_sum_ref, share_ref, *refs = refs
    q_ids_ref, k_ids_ref, *refs = refs if plan.has_ids else (None, None, *refs)
    d_q_ref, queries, d_outputs, log_sums, shares, d_query_ref = refs
    batch, i, span = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    offset = offset_ref[batch]
    windows = [*zip(plan.windows(plan.key_width), plan.windows(plan.value_width), strict=True)]
    factor = plan.options.scale * LOG2_E
    q_ids = None if q_ids_ref is None else as_column(q_ids_ref[0])

    @pl.when(span == 0)
    def _():
        d_output = d_out_ref[0]
        if plan.has_ids:
            d_output = keep_real(d_output, 0, run.num_q, q_ids)
        for head, (key, value) in enumerate(windows):
            queries[head, :, : key.width] = of_head(q_ref[0], key)
            d_outputs[head, :, : value.width] = of_head(d_output, value)
            log_sums[head] = as_column(log_sum_ref[0, head])
            shares[head] = as_column(share_ref[0, head])
        d_query_ref[...] = jnp.zeros_like(d_query_ref)

    seen_end = keys_end(plan, offset, 0, plan.num_queries)
    may_hold_garbage = plan.has_ids or plan.num_keys % run.num_k or not plan.sees_all_keys_at_last

    def visit(j, masked: bool):
        row = pl.multiple_of((j - span * spans.tiles) * run.num_k, run.num_k)
        keys, values = (ref[0, pl.ds(row, run.num_k)] for ref in (k_ref, v_ref))
        k_ids = None if k_ids_ref is None else k_ids_ref[0, :, pl.ds(row, run.num_k)]
        sees = visible(run, i, j, offset, q_ids, k_ids) if masked else None
        if masked and may_hold_garbage:
            column = None if k_ids is None else as_column(k_ids)
            keys, values = (keep_real(x, j * run.num_k, seen_end, column) for x in (keys, values))
        for head, (key, value) in enumerate(windows):
            k_head = keys[:, key.start : key.stop]
            scores = product(queries[head, :, : key.width], k_head, (1, 1)) * factor
            weights = jnp.exp2(scores - widen(log_sums[head], run.num_k))
            weights = where_visible(sees, weights, 0)
            v_head = values[:, value.start : value.stop]
            d_weights = product(d_outputs[head, :, : value.width], v_head, (1, 1))
            d_scores = weights * (d_weights - widen(shares[head], run.num_k))
            d_query_ref[head, :, : key.width] += product(d_scores, k_head, (1, 0))

    each_key_tile(spans, ranges_ref, offset, batch, i, span, visit)

    @pl.when(span == spans.count - 1)
    def _():
        keys_of = [key for key, _ in windows]
        parts = [d_query_ref[head, :, : w.width] for head, w in enumerate(keys_of)]
        store_heads(d_q_ref, [plan.options.scale * x for x in parts], keys_of)
