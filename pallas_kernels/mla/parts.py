"""Attention to some of the keys, to be joined with the rest: what a ring of devices needs.

A query's softmax over all keys follows from those over parts of them: with the log-sum-exp l_j of
its scores in part j and the output o_j of that part alone, it is

    l = log sum_j exp(l_j),    o = sum_j exp(l_j - l) o_j,

and given l and o of the whole, the gradients of each part follow without the other parts.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.mla import mosaic_gpu, mosaic_tpu, reference, xla
from pallas_kernels.mla.options import AttentionOptions

_FORMS = {"reference": reference, "xla": xla, "mosaic_tpu": mosaic_tpu, "mosaic_gpu": mosaic_gpu}


def attention_part(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_offset: int | jax.Array = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention to these keys alone; arguments as of `mla_attention`.

    Args:
        q: [B, T, H, K].
        k: [B, S, H, K], a part of the keys.
        v: [B, S, H, V].
        scale: static.
        segment_ids: [B, T] or None.
        kv_segment_ids: [B, S]; given if `segment_ids` is.
        q_offset: position of the first query, counted from the first key of the part; may be
            negative.
        implementation: as in `mla_attention`.

    Returns:
        output [B, T, H, V] float32, and the log-sum-exp of the scores [B, H, T] float32 (both
        float64 where q is); 0 and -inf where a query sees no key of the part. Not differentiable:
        `attention_part_gradients` is its gradient.
    """
    form, options = _prepare(q, k, v, scale, implementation)
    output, log_sum = form.part(q, k, v, options, segment_ids, kv_segment_ids, q_offset)
    return output, jnp.where(log_sum == jnp.inf, -jnp.inf, log_sum)


def attention_part_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    output: jax.Array,
    log_sum: jax.Array,
    d_output: jax.Array,
    *,
    scale: float,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_offset: int | jax.Array = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q (what this part adds), k and v.

    Args:
        q: this and what else bears the name of an argument of `attention_part` is the same.
        k: likewise.
        v: likewise.
        output: [B, T, H, V] over all keys.
        log_sum: [B, H, T] over all keys, -inf where a query sees none.
        d_output: [B, T, H, V].
        scale: likewise.
        segment_ids: likewise.
        kv_segment_ids: likewise.
        q_offset: likewise.
        implementation: likewise.
    """
    form, options = _prepare(q, k, v, scale, implementation)
    # Kernels take +inf, which makes every weight of such a query 0.
    log_sum = jnp.where(log_sum == -jnp.inf, jnp.inf, log_sum)
    return form.part_gradients(
        q, k, v, options, segment_ids, kv_segment_ids, q_offset, output, log_sum, d_output
    )


def join_parts(
    output: jax.Array, log_sum: jax.Array, other: jax.Array, other_log_sum: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp over the keys of both parts, as `attention_part` returns them."""
    joined = jnp.logaddexp(log_sum, other_log_sum)
    finite = jnp.where(joined == -jnp.inf, 0, joined)  # exp(-inf - 0) is 0, never NaN

    def share(x, log_sum):
        return x * jnp.swapaxes(jnp.exp(log_sum - finite), 1, 2)[..., None]

    return share(output, log_sum) + share(other, other_log_sum), joined


def _prepare(q, k, v, scale, implementation):
    output_dtype = jnp.promote_types(q.dtype, jnp.float32)
    limits = {
        "mosaic_tpu": lambda: mosaic_tpu.unsupported(q, k, v, output_dtype),
        "mosaic_gpu": lambda: mosaic_gpu.unsupported(q, k, v, output_dtype),
    }
    chosen = choose_implementation("mla_attention", implementation, limits)
    options = AttentionOptions(
        scale=scale, causal=True, output_dtype=output_dtype, return_max=False
    )
    return _FORMS[chosen], options
