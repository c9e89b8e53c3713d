"""Gated MLA without positions: the expanded form for many tokens, the absorbed form for one."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import meshes
import pallas_kernels
from k3jax.ops.dense import whole_over_tensor
from k3jax.ops.layout import chunks_of, cutting, from_balanced, num_ranks, to_balanced
from k3jax.ops.mla_keys import expand
from k3jax.ops.parallel import DEFAULT_PARALLEL, Parallel
from k3jax.ops.ring_attention import ring_attention
from k3jax.precision import matmul_precision


def latent_attention(
    q: jax.Array,  # [B, T, H, n + r]
    latent: jax.Array,  # [B, S, C] after its norm
    k_rope: jax.Array,  # [B, S, r], shared by all heads, never rotated
    kv_b: jax.Array,  # [C, H, n + V], expands a latent to keys and values
    *,
    nope_dim: int,
    segment_ids: jax.Array | None = None,  # [B, T]
    kv_segment_ids: jax.Array | None = None,  # [B, S]
    q_offset: int | jax.Array = 0,
    parallel: Parallel = DEFAULT_PARALLEL,
) -> jax.Array:
    """Causal softmax attention, scale (n + r)^-0.5; [B, T, H, V] in q's dtype.

    `q_offset` is the key position of the first query (the number of cached tokens).

    Where mesh axes cut the tokens, the latents travel, not the keys: C + r numbers per token
    instead of H (n + V). With `parallel.attention="gather"` every device gets all of them and
    expands them for its own queries; "ring" passes those of one device after the other around.
    With `parallel.context_layout="balanced"` q must come in balanced order
    (`k3jax.ops.balance_tokens`); the result is in order.
    """
    batch, tokens, heads, _ = meshes.spec_of(q)
    cut = cutting(tokens)
    is_balanced = parallel.context_layout == "balanced" and bool(cut)
    # Latents of a cache are whole on every device: nothing has to go round.
    is_ring = parallel.attention == "ring" and bool(cut and cutting(meshes.spec_of(latent)[1]))
    if is_ring:
        latent, k_rope = whole_over_tensor(latent), whole_over_tensor(k_rope)
    keys = meshes.spec_of(latent)[1]
    kv_b, pieces = kv_b.astype(q.dtype), meshes.pieces_of(kv_b)
    pieces, stored = (pieces[0], (), pieces[2]), meshes.spec_of(kv_b)

    def run(q, latent, k_rope, kv_b, segment_ids, kv_segment_ids, q_offset):
        kv_b = meshes.gather_pieces(kv_b, pieces)
        if is_balanced and segment_ids is not None:
            segment_ids = to_balanced(segment_ids, cut)
        joint = jnp.concatenate([latent, k_rope], axis=-1)
        if is_ring:
            if is_balanced:
                joint = to_balanced(joint, cut)
            output = ring_attention(
                q, joint, kv_b, segment_ids,
                nope_dim=nope_dim, layout=parallel.context_layout, axes=cut,
            )  # fmt: skip
            return from_balanced(output, cut) if is_balanced else output
        if cutting(keys):
            joint = jax.lax.all_gather(joint, cutting(keys), axis=1, tiled=True)
        k, v = expand(joint, kv_b, nope_dim)
        size, places = q.shape[1], (0,)
        if cut:
            rank, ranks = jax.lax.axis_index(cut), num_ranks(cut)
            places = chunks_of(rank, ranks, parallel.context_layout)
            size = size // len(places)
        parts = [
            pallas_kernels.mla_attention(
                q[:, n * size : (n + 1) * size],
                k,
                v,
                scale=q.shape[-1] ** -0.5,
                segment_ids=None
                if segment_ids is None
                else segment_ids[:, n * size : (n + 1) * size],
                kv_segment_ids=kv_segment_ids,
                q_offset=q_offset + place * size,
            )
            for n, place in enumerate(places)
        ]
        output = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
        return from_balanced(output, cut) if is_balanced else output

    row = P(batch, tokens, heads, None)
    specs = [
        *(row, P(batch, keys, None), P(batch, keys, None), P(stored[0], heads, stored[2])),
        None if segment_ids is None else P(batch, tokens),
        None if kv_segment_ids is None else P(batch, None),
    ]
    operands = (q, latent, k_rope, kv_b, segment_ids, kv_segment_ids)
    if isinstance(q_offset, int):  # kernels then know it, too
        known = q_offset
        return meshes.per_device(lambda *a: run(*a, known), specs, row)(*operands)
    return meshes.per_device(run, [*specs, P()], row)(*operands, q_offset)


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
