"""Kimi Delta Attention layer."""

import jax
from flax import nnx

from k3jax import ops
from k3jax.config import K3Config
from k3jax.nn.cache import CallContext, KDACache
from k3jax.nn.initializers import Constant, LogDecay, Normal, StepBias, Uniform
from k3jax.nn.parameters import weight


class KimiDeltaAttention(nnx.Module):
    """Short convolutions, per-channel decay gate, delta rule, gated output norm."""

    def __init__(self, cfg: K3Config, key: jax.Array):
        heads, width, taps = cfg.kda.num_heads, cfg.kda.head_dim, cfg.kda.conv_size
        keys = iter(jax.random.split(key, 16))
        normal = Normal(cfg.initializer_range)
        head_dims = ("embed", "heads", "head_dim")

        def projection():
            return weight(next(keys), (cfg.dim, heads, width), head_dims, normal)

        def convolution():
            return weight(
                next(keys),
                (taps, heads, width),
                ("conv", "heads", "head_dim"),
                Uniform(taps**-0.5),
                keep_float32=True,
            )

        self.cfg = cfg
        self.q_proj, self.k_proj, self.v_proj = projection(), projection(), projection()
        self.q_conv, self.k_conv, self.v_conv = convolution(), convolution(), convolution()
        self.A_log = weight(
            next(keys),
            (heads,),
            ("heads",),
            LogDecay(cfg.kda.gate_lower_bound is not None),
            keep_float32=True,
        )
        self.dt_bias = weight(
            next(keys), (heads, width), ("heads", "head_dim"), StepBias(), keep_float32=True
        )
        self.f_a = weight(next(keys), (cfg.dim, width), ("embed", "latent"), normal)
        self.f_b = weight(next(keys), (width, heads, width), ("rank", "heads", "head_dim"), normal)
        self.b_proj = weight(next(keys), (cfg.dim, heads), ("embed", "heads"), normal)
        if cfg.kda.full_rank_gate:
            self.g_proj = projection()
        else:
            self.g_a = weight(next(keys), (cfg.dim, width), ("embed", "latent"), normal)
            self.g_b = weight(
                next(keys), (width, heads, width), ("rank", "heads", "head_dim"), normal
            )
        self.o_norm = weight(None, (width,), (None,), Constant(1.0), keep_float32=True)
        self.o_proj = weight(
            next(keys), (heads, width, cfg.dim), ("heads", "head_dim", "embed"), normal
        )

    def __call__(
        self, x: jax.Array, cache: KDACache | None, context: CallContext
    ) -> tuple[jax.Array, KDACache | None]:
        """X [B, T, D] -> [B, T, D], and the cache after the last real token."""
        with jax.named_scope("kda"):
            raw = [ops.dense("btd,dhk->bthk", x, p[...]) for p in self._qkv()]
            tails = (None,) * 3 if cache is None else cache[1:]
            convs = (self.q_conv, self.k_conv, self.v_conv)
            with jax.named_scope("short_conv"):
                convolved = [
                    ops.short_conv(
                        u, conv[...], segment_ids=context.segment_ids, initial_state=tail
                    )
                    for u, conv, tail in zip(raw, convs, tails)
                ]
            (q, q_tail), (k, k_tail), (v, v_tail) = convolved
            low_rank = ops.dense("btd,dr->btr", x, self.f_a[...])
            decay_logits = ops.dense("btr,rhk->bthk", low_rank, self.f_b[...])
            beta_logits = ops.dense("btd,dh->bth", x, self.b_proj[...])
            lower_bound = self.cfg.kda.gate_lower_bound
            arguments = (q, k, v, decay_logits, beta_logits, self.A_log[...], self.dt_bias[...])
            with jax.named_scope("delta_rule"):
                if context.decode:
                    output, state = ops.delta_attention_step(
                        *arguments, cache.state, lower_bound=lower_bound
                    )
                else:
                    output, state = ops.delta_attention(
                        *arguments,
                        lower_bound=lower_bound,
                        initial_state=None if cache is None else cache.state,
                        segment_ids=context.segment_ids,
                    )
            with jax.named_scope("output"):
                gated = ops.gated_rms_norm(
                    output, self.o_norm[...], self._gate(x), self.cfg.norm_eps
                )
                result = ops.dense("bthk,hkd->btd", gated, self.o_proj[...])
        if cache is None:
            return result, None
        new = KDACache(state, q_tail, k_tail, v_tail)
        return result, KDACache(*(context.keep_old(n, o) for n, o in zip(new, cache)))

    def _qkv(self):
        return self.q_proj, self.k_proj, self.v_proj

    def _gate(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, H, V]
        if self.cfg.kda.full_rank_gate:
            return ops.dense("btd,dhk->bthk", x, self.g_proj[...])
        return ops.dense("btr,rhk->bthk", ops.dense("btd,dr->btr", x, self.g_a[...]), self.g_b[...])
