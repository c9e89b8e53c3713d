"""Attention with segments and unequal key and value widths, in tiles (flash attention)."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import (
    require_float_type,
    require_floating,
    require_integer,
    require_rank,
    require_shape,
    static_float,
)
from pallas_kernels.debug import check_segment_order
from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.mla import mosaic_gpu, mosaic_tpu, reference, xla
from pallas_kernels.mla.decode import mla_decode
from pallas_kernels.mla.options import AttentionOptions

__all__ = ["mla_attention", "mla_decode"]

_FORMS = {
    "reference": reference.mla_attention,
    "xla": xla.mla_attention,
    "mosaic_tpu": mosaic_tpu.mla_attention,
    "mosaic_gpu": mosaic_gpu.mla_attention,
}


def mla_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_offset: int | jax.Array = 0,
    causal: bool = True,
    output_dtype: jax.typing.DTypeLike | None = None,
    return_max: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend from each query to the keys before it (or all keys) of its segment.

        output[t] = sum_s softmax_s(scale * q[t] . k[s]) v[s]
        over s <= t + q_offset (all s unless causal) with kv_segment_ids[s] == segment_ids[t] != 0.

    A query that sees no key (padding, for one) returns 0 and passes no gradient. Padded
    queries, and keys and values that are padding or lie past the last query, may hold NaN.

    Args:
        q: queries [B, T, H, K]; T at least 1, B = 0 with "xla" (and None). The TPU kernels take
            float32 or bfloat16, those of GPU bfloat16, "xla" and "reference" any float type.
        k: keys [B, S, H, K].
        v: values [B, S, H, V].
        scale: static; factor of the scores, usually K^-0.5.
        segment_ids: int [B, T] of the queries; None when every token is real and of one segment.
        kv_segment_ids: int [B, S] of the keys; None takes `segment_ids`, which needs S = T.
        q_offset: position of the first query among the keys, an int or int32 [] or [B].
        causal: False lets a query see every key of its segment, whatever the offset.
        output_dtype: of the output, float32 or bfloat16; None takes q.dtype.
        return_max: also return the largest scaled score of each head, for QK-clip. No gradient
            passes through it.
        implementation: None, "reference", "xla", "mosaic_tpu" or "mosaic_gpu".

    Returns:
        output [B, T, H, V]; scores and softmax are float32. With `return_max` (output, max), where
        max is the largest scale * q[t] . k[s] over all pairs that see each other, float32 [B, H],
        -inf where none does.

    Raises:
        ValueError: shapes disagree, there are no tokens, one of the ids is missing, scale is not
            finite, or the implementation is unknown.
        TypeError: q, k, v or the output is not floating point, ids or offset are not integers, or
            scale is traced.
        NotImplementedError: the named implementation does not run on the device or does not take
            these shapes or dtypes.
    """
    op = "mla_attention"
    require_rank(op, "B T H K", q=q)
    require_rank(op, "B S H K", k=k)
    require_rank(op, "B S H V", v=v)
    require_floating(op, q=q, k=k, v=v)
    (batch, num_queries, heads, width), num_keys = q.shape, k.shape[1]
    require_shape(op, (batch, num_keys, heads, width), "(B, S, H, K of q and k)", k=k)
    require_shape(op, (batch, num_keys, heads, v.shape[-1]), "(B, S, H of k, V)", v=v)
    if min(num_queries, num_keys) < 1:
        raise ValueError(f"{op}: q {q.shape} and k {k.shape} need at least one token each")
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError(f"{op}: kv_segment_ids without segment_ids; pass the ids of the queries")
    if segment_ids is not None:
        require_integer(op, segment_ids=segment_ids)
        require_shape(op, (batch, num_queries), "(B, T of q)", segment_ids=segment_ids)
        if kv_segment_ids is None:
            if num_keys != num_queries:
                raise ValueError(
                    f"{op}: {num_keys} keys and {num_queries} queries differ; "
                    "pass kv_segment_ids [B, S]"
                )
            kv_segment_ids = segment_ids
        require_integer(op, kv_segment_ids=kv_segment_ids)
        require_shape(op, (batch, num_keys), "(B, S of k)", kv_segment_ids=kv_segment_ids)
        check_segment_order(op, segment_ids)
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
        kv_segment_ids = jnp.asarray(kv_segment_ids, jnp.int32)
    if not isinstance(q_offset, int):
        q_offset = jnp.asarray(q_offset)
        require_integer(op, q_offset=q_offset)
        if q_offset.shape not in ((), (batch,)):
            raise ValueError(
                f"{op}: q_offset has shape {q_offset.shape}; expected () or ({batch},)"
            )
    q, k, v = map(jnp.asarray, (q, k, v))
    output_dtype = q.dtype if output_dtype is None else output_dtype
    require_float_type(op, output_dtype=output_dtype)
    output_dtype = jnp.dtype(output_dtype)
    limits = {
        "mosaic_tpu": lambda: mosaic_tpu.unsupported(q, k, v, output_dtype),
        "mosaic_gpu": lambda: mosaic_gpu.unsupported(q, k, v, output_dtype),
    }
    form = _FORMS[choose_implementation(op, implementation, limits)]
    options = AttentionOptions(
        scale=static_float(op, scale=scale),
        causal=causal,
        output_dtype=output_dtype,
        return_max=return_max,
    )
    output, largest = form(q, k, v, options, segment_ids, kv_segment_ids, q_offset)
    return (output, largest) if return_max else output
