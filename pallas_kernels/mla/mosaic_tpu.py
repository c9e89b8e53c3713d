"""Flash attention on TPU: one kernel forward, two backward (dk and dv; dq).

Each kernel holds a tile of one side and runs through the other, which stays in fast memory for a
whole head group, so that the main memory is read about once per operand. Operands are read as
[B, T, H*K]; see `mosaic_tpu_plan` for the widths that need no copy. Operands in bfloat16 are
multiplied in one pass with float32 sums, operands in float32 exactly.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.checks import align_varying, empty
from pallas_kernels.mla.mosaic_tpu_backward import key_gradients, query_gradients
from pallas_kernels.mla.mosaic_tpu_forward import forward
from pallas_kernels.mla.mosaic_tpu_plan import LANES, LOG2_E, Plan, heads_per_group
from pallas_kernels.mla.options import AttentionOptions

_WIDEST = 512


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array, output_dtype: jnp.dtype) -> str | None:
    """Say why the kernels do not take these arguments, or None."""
    if problem := empty(q=q, v=v):
        return problem
    if q.dtype not in (jnp.float32, jnp.bfloat16) or not q.dtype == k.dtype == v.dtype:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; all must be float32 or all bfloat16"
    if output_dtype not in (jnp.float32, jnp.bfloat16):
        return f"output_dtype={output_dtype} is neither float32 nor bfloat16"
    if max(q.shape[-1], v.shape[-1]) > _WIDEST:
        return f"head widths K={q.shape[-1]}, V={v.shape[-1]} exceed {_WIDEST}"
    return None


def mla_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: AttentionOptions,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    q_offset: int | jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """See `pallas_kernels.mla_attention`."""
    (batch, num_queries, heads, _), value_width = q.shape, v.shape[-1]
    plan, *operands = _arrange(q, k, v, options, segment_ids, kv_segment_ids, q_offset)
    output, row_max = _attention(plan, *operands)
    output = output.reshape(batch, num_queries, heads, -1)[..., :value_width]
    if row_max is not None:
        row_max = jnp.max(row_max[:, :, 0], axis=2) / LOG2_E
    return output, row_max


def part(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: AttentionOptions,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    q_offset: int | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.mla.parts`."""
    plan, *operands = _arrange(q, k, v, options, segment_ids, kv_segment_ids, q_offset)
    output, log_sum, _ = forward(plan, *operands)
    output = output.reshape(*q.shape[:3], -1)[..., : v.shape[-1]]
    return output, log_sum[:, :, 0] / LOG2_E


def part_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: AttentionOptions,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    q_offset: int | jax.Array,
    output: jax.Array,
    log_sum: jax.Array,
    d_output: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.mla.parts`."""

    def arrange(q, k, v):
        plan, *operands, ids, offset = _arrange(
            q, k, v, options, segment_ids, kv_segment_ids, q_offset
        )
        return tuple(operands), (plan, ids, offset)

    operands, back, (plan, ids, offset) = jax.vjp(arrange, q, k, v, has_aux=True)
    extra = plan.value_width - v.shape[-1]
    output, d_output = (
        jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, extra))).reshape(*x.shape[:2], -1)
        for x in (output, d_output)
    )
    kept = (*operands, ids, offset, output, log_sum[:, :, None] * LOG2_E)
    return back(_attention_backward(plan, kept, (d_output, None))[:3])


def _arrange(q, k, v, options, segment_ids, kv_segment_ids, q_offset):
    """The call, and q, k, v, ids and offset as the kernels read them."""
    batch, num_queries, heads, key_width = q.shape
    value_width = v.shape[-1]
    group = heads_per_group(heads, key_width, value_width)
    if not group:

        def pad(x):
            return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[-1] % LANES)))

        q, k, v = pad(q), pad(k), pad(v)
    plan = Plan(
        options=options,
        batch=batch,
        num_queries=num_queries,
        num_keys=k.shape[1],
        heads=heads,
        key_width=q.shape[-1],
        value_width=v.shape[-1],
        group=group or 1,
        has_ids=segment_ids is not None,
        offset=q_offset if isinstance(q_offset, int) else None,
    )
    offset = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), (batch,))
    q, k, v = (x.reshape(*x.shape[:2], -1) for x in (q, k, v))
    if segment_ids is None:
        q, k, v, offset = align_varying(q, k, v, offset)
        return plan, q, k, v, None, offset
    q, k, v, offset, *ids = align_varying(q, k, v, offset, segment_ids, kv_segment_ids)
    return plan, q, k, v, tuple(ids), offset


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan, q, k, v, ids, offset):
    output, _, row_max = forward(plan, q, k, v, ids, offset)
    return output, row_max


def _attention_forward(plan, q, k, v, ids, offset):
    output, log_sum, row_max = forward(plan, q, k, v, ids, offset)
    return (output, row_max), (q, k, v, ids, offset, output, log_sum)


def _attention_backward(plan, kept, cotangents):
    q, k, v, ids, offset, output, log_sum = kept
    d_output = cotangents[0]
    # Of a query that sees nothing neither output nor gradient counts.
    per_head = (*d_output.shape[:2], plan.heads, plan.value_width)
    share = d_output.astype(jnp.float32) * output.astype(jnp.float32)
    share = jnp.swapaxes(jnp.sum(share.reshape(per_head), axis=3), 1, 2)[:, :, None]
    share = jnp.where(log_sum < jnp.inf, share, 0)
    operands = (q, k, v, d_output.astype(q.dtype), log_sum, share, ids, offset)
    d_k, d_v = key_gradients(plan, *operands)
    return query_gradients(plan, *operands), d_k, d_v, None, None


_attention.defvjp(_attention_forward, _attention_backward)
