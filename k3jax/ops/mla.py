"""Gated MLA without positions: the expanded form for many tokens, the absorbed form for one."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import meshes
import pallas_kernels
from k3jax.precision import matmul_precision


def latent_attention(
    q: jax.Array,  # [B, T, H, n + r]
    k_nope: jax.Array,  # [B, S, H, n]
    k_rope: jax.Array,  # [B, S, r], shared by all heads, never rotated
    v: jax.Array,  # [B, S, H, V]
    *,
    segment_ids: jax.Array | None = None,  # [B, T]
    kv_segment_ids: jax.Array | None = None,  # [B, S]
    q_offset: int | jax.Array = 0,
) -> jax.Array:
    """Causal softmax attention, scale (n + r)^-0.5; [B, T, H, V] in v's dtype.

    `q_offset` is the key position of the first query (the number of cached tokens).
    """
    batch, _, heads, _ = meshes.spec_of(q)
    row = P(batch, None, heads, None)
    scale = q.shape[-1] ** -0.5

    def run(q, k_nope, k_rope, v, segment_ids, kv_segment_ids, q_offset):
        shared = jnp.broadcast_to(k_rope[:, :, None, :], (*k_nope.shape[:3], k_rope.shape[-1]))
        return pallas_kernels.mla_attention(
            q,
            jnp.concatenate([k_nope, shared], axis=-1),
            v,
            scale=scale,
            segment_ids=segment_ids,
            kv_segment_ids=kv_segment_ids,
            q_offset=q_offset,
        )

    specs = (
        *(row, row, P(batch, None, None), row),
        None if segment_ids is None else P(batch, None),
        None if kv_segment_ids is None else P(batch, None),
        P(),
    )
    if isinstance(q_offset, int) and not meshes.has_mesh():
        return run(q, k_nope, k_rope, v, segment_ids, kv_segment_ids, q_offset)
    return meshes.per_device(run, specs, row)(
        q, k_nope, k_rope, v, segment_ids, kv_segment_ids, jnp.asarray(q_offset, jnp.int32)
    )


def latent_attention_step(
    q: jax.Array,  # [B, 1, H, n + r]
    kv_b: jax.Array,  # [C, H, n + V], the expansion that is absorbed instead of applied
    latent: jax.Array,  # [B, S, C] after its norm
    k_rope: jax.Array,  # [B, S, r]
    valid: jax.Array,  # [B, S] bool: the keys this token may see
    *,
    nope_dim: int,
) -> jax.Array:
    """One query against cached latents: scores and values stay in the latent space.

    q_n . (W_k c) = (W_k^T q_n) . c, and sum_s p_s W_v c_s = W_v sum_s p_s c_s, so no key or value
    of the context is ever expanded. Returns [B, 1, H, V] in q's dtype.
    """
    batch, _, heads, _ = meshes.spec_of(q)
    dtype, precision = q.dtype, matmul_precision(q.dtype)

    def run(q, kv_b, latent, k_rope, valid):
        kv_b = kv_b.astype(dtype)
        q_nope, q_rope = q[:, 0, :, :nope_dim], q[:, 0, :, nope_dim:]
        w_key, w_value = kv_b[..., :nope_dim], kv_b[..., nope_dim:]
        q_latent = jnp.einsum("bhn,chn->bhc", q_nope, w_key, precision=precision)
        scores = jnp.einsum(
            "bhc,bsc->bhs",
            q_latent,
            latent,
            precision=precision,
            preferred_element_type=jnp.float32,
        ) + jnp.einsum(
            "bhr,bsr->bhs",
            q_rope,
            k_rope,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        scores = jnp.where(valid[:, None, :], scores * q.shape[-1] ** -0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
        # Unwritten cache rows have weight 0, but 0 * NaN would still poison the sum.
        seen = jnp.where(valid[..., None], latent, 0)
        context = jnp.einsum("bhs,bsc->bhc", weights, seen, precision=precision)
        return jnp.einsum("bhc,chv->bhv", context, w_value, precision=precision)[:, None]

    specs = (
        P(batch, None, heads, None),
        P(None, heads, None),
        P(batch, None, None),
        P(batch, None, None),
        P(batch, None),
    )
    return meshes.per_device(run, specs, P(batch, None, heads, None))(
        q, kv_b, latent, k_rope, valid
    )
