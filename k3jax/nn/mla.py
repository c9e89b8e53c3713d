"""Gated multi-head latent attention without positions."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax import ops
from k3jax.config import K3Config
from k3jax.nn.cache import CallContext, MLACache, write_columns
from k3jax.nn.initializers import Normal
from k3jax.nn.norm import RMSNorm
from k3jax.nn.parameters import weight


class LatentAttention(nnx.Module):
    """Queries from a low-rank (or full) projection, keys and values from one shared latent."""

    def __init__(self, cfg: K3Config, key: jax.Array):
        mla = cfg.mla
        q_a, q_b, kv_a, kv_b, gate, out = jax.random.split(key, 6)
        normal = Normal(cfg.initializer_range)
        head_dims = ("heads", "head_dim")
        self.cfg = cfg
        q_shape = (mla.num_heads, mla.qk_head_dim)
        if mla.q_lora_rank is None:
            self.q_proj = weight(q_b, (cfg.dim, *q_shape), ("embed", *head_dims), normal)
        else:
            rank = mla.q_lora_rank
            self.q_a = weight(q_a, (cfg.dim, rank), ("embed", "latent"), normal)
            self.q_norm = RMSNorm(rank, mla.latent_norm_eps)
            self.q_b = weight(q_b, (rank, *q_shape), ("rank", *head_dims), normal)
        self.kv_a = weight(
            kv_a, (cfg.dim, mla.kv_lora_rank + mla.qk_rope_head_dim), ("embed", "latent"), normal
        )
        self.kv_norm = RMSNorm(mla.kv_lora_rank, mla.latent_norm_eps)
        self.kv_b = weight(
            kv_b,
            (mla.kv_lora_rank, mla.num_heads, mla.qk_nope_head_dim + mla.v_head_dim),
            ("rank", *head_dims),
            normal,
        )
        v_shape = (mla.num_heads, mla.v_head_dim)
        if mla.output_gate:
            self.g_proj = weight(gate, (cfg.dim, *v_shape), ("embed", *head_dims), normal)
        self.o_proj = weight(out, (*v_shape, cfg.dim), (*head_dims, "embed"), normal)

    def __call__(
        self, x: jax.Array, cache: MLACache | None, context: CallContext
    ) -> tuple[jax.Array, MLACache | None]:
        """X [B, T, D] -> [B, T, D], and the cache with this call's latents."""
        mla = self.cfg.mla
        with jax.named_scope("mla"):
            q = self._query(x, context)
            joint = ops.dense("btd,dc->btc", x, self.kv_a[...])
            latent = self.kv_norm(joint[..., : mla.kv_lora_rank])
            k_rope = joint[..., mla.kv_lora_rank :]
            segment_ids, offset = context.segment_ids, 0
            kv_segment_ids = segment_ids
            if cache is not None:
                latent, k_rope = ops.whole_tokens(latent), ops.whole_tokens(k_rope)
                cache = MLACache(
                    write_columns(cache.latent, latent, context),
                    write_columns(cache.k_rope, k_rope, context),
                )
                latent, k_rope = (c.astype(x.dtype) for c in cache)
                kv_segment_ids, offset = context.kv_segment_ids, context.length
                if segment_ids is None:
                    segment_ids = jnp.ones(x.shape[:2], jnp.int32)
            if context.decode:
                output = ops.latent_attention_step(
                    q,
                    self.kv_b[...],
                    latent,
                    k_rope,
                    kv_segment_ids > 0,
                    nope_dim=mla.qk_nope_head_dim,
                )
            else:
                output = ops.latent_attention(
                    q,
                    latent,
                    k_rope,
                    self.kv_b[...],
                    nope_dim=mla.qk_nope_head_dim,
                    segment_ids=segment_ids,
                    kv_segment_ids=kv_segment_ids,
                    q_offset=offset,
                    parallel=context.parallel,
                )
            if mla.output_gate:
                output = output * jax.nn.sigmoid(ops.dense("btd,dhv->bthv", x, self.g_proj[...]))
            return ops.dense("bthv,hvd->btd", output, self.o_proj[...]), cache

    def _query(self, x: jax.Array, context: CallContext) -> jax.Array:
        """[B, T, D] -> [B, T, H, n + r], in the order of tokens that attention wants."""
        is_balanced = context.parallel.context_layout == "balanced" and not context.decode
        balance = ops.balance_tokens if is_balanced else lambda x: x
        if self.cfg.mla.q_lora_rank is None:
            return balance(ops.dense("btd,dhk->bthk", x, self.q_proj[...]))
        rank = self.q_norm(ops.dense("btd,dr->btr", x, self.q_a[...]))
        # Of what is on the way to the queries this is narrowest.
        return ops.dense("btr,rhk->bthk", balance(ops.whole_over_tensor(rank)), self.q_b[...])
