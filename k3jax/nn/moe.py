"""Stable LatentMoE, and the plain sigmoid MoE it contains."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax import ops
from k3jax.config import K3Config
from k3jax.nn.balancing import count_step, sum_scores
from k3jax.nn.cache import CallContext
from k3jax.nn.feed_forward import GatedMLP, gated_activation
from k3jax.nn.initializers import Normal
from k3jax.nn.norm import RMSNorm
from k3jax.nn.parameters import RouterBias, weight


class LatentMoE(nnx.Module):
    """Routed experts on the latent, shared experts and router on the full hidden state.

    z = x W_down; u = sum_e w_e expert_e(z) (complete over all experts); y = norm(u) W_up;
    result y + shared(x). Without a latent width the experts read x and y = u.

    `expert_gate`, `expert_up` and `expert_down` are trained arrays, or `PackedMatrix` after
    `k3jax.model.pack_experts`.
    """

    def __init__(self, cfg: K3Config, key: jax.Array):
        moe = cfg.moe
        router, down, up, w1, w3, w2, shared = jax.random.split(key, 7)
        normal = Normal(cfg.initializer_range)
        width = moe.latent_dim or cfg.dim
        into = (moe.num_experts, width, moe.expert_hidden_dim)
        back = (moe.num_experts, moe.expert_hidden_dim, width)
        into_dims = ("experts", "expert_latent", "ffn")
        back_dims = ("experts", "ffn", "expert_latent")
        self.cfg = cfg
        self.router = weight(router, (cfg.dim, moe.num_experts), ("embed", None), normal)
        self.router_bias = RouterBias(jnp.zeros((moe.num_experts,), jnp.float32))
        if moe.latent_dim is not None:
            self.latent_down = weight(down, (cfg.dim, width), ("embed", "latent"), normal)
            self.latent_up = weight(up, (width, cfg.dim), ("latent", "embed"), normal)
            if moe.latent_norm:
                self.latent_norm = RMSNorm(width, cfg.norm_eps)
        self.expert_gate = weight(w1, into, into_dims, normal)
        self.expert_up = weight(w3, into, into_dims, normal)
        self.expert_down = weight(w2, back, back_dims, normal)
        if moe.num_shared_experts:
            hidden = moe.num_shared_experts * moe.expert_hidden_dim
            self.shared = GatedMLP(cfg, hidden, shared)

    def __call__(self, x: jax.Array, context: CallContext) -> tuple[jax.Array, dict]:
        """X [B, T, D] -> [B, T, D], and what the context asked to collect."""
        moe = self.cfg.moe
        with jax.named_scope("router"):
            ids, weights, collected = self._route(x, context)
        with jax.named_scope("routed_experts"):
            latent = x
            if moe.latent_dim is not None:
                latent = ops.dense("btd,dc->btc", x, self.latent_down[...])
            real = None if context.segment_ids is None else context.segment_ids != 0
            routed = ops.routed_experts(
                latent,
                ids,
                weights,
                real,
                self.expert_gate[...],
                self.expert_up[...],
                self.expert_down[...],
                gated_activation(self.cfg),
                parallel=context.parallel,
                with_load=context.statistics,
            )
            out, load = routed if context.statistics else (routed, None)
            if load is not None:
                collected["exchange_load"] = load
            if moe.latent_dim is not None:
                if moe.latent_norm:
                    out = self.latent_norm(out)
                out = ops.dense("btc,cd->btd", out, self.latent_up[...])
        if moe.num_shared_experts:
            with jax.named_scope("shared_experts"):
                out = out + self.shared(x)
        return out, collected

    def _route(self, x: jax.Array, context: CallContext):
        moe = self.cfg.moe
        # In float32 whatever the model's type: rounded, scores and bias choose other experts.
        logits = ops.dense("btd,de->bte", x.astype(jnp.float32), self.router[...])
        if moe.router_activation == "softmax":
            scores = jax.nn.softmax(logits, axis=-1)
        else:
            scores = jax.nn.sigmoid(logits)
        bias = self.router_bias[...]
        ids, cutoff = ops.select_experts(
            scores,
            bias,
            experts_per_token=moe.experts_per_token,
            num_groups=moe.num_expert_groups,
            topk_groups=moe.topk_groups,
        )
        weights = ops.gather_scores(scores, ids)
        if moe.experts_per_token > 1 and moe.renormalize:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        weights = weights * moe.routed_scaling_factor
        collected = {}
        if context.statistics:
            real = None if context.segment_ids is None else context.segment_ids != 0
            counts, histogram = count_step(scores, ids, cutoff, bias, real)
            collected["expert_counts"], collected["histogram"] = counts, histogram
            if context.auxiliary:
                collected["score_sums"] = sum_scores(scores, real)
        if context.trace:
            order = jnp.argsort(ids, axis=-1)
            collected["expert_ids"] = jnp.take_along_axis(ids, order, axis=-1)
            collected["expert_weights"] = jnp.take_along_axis(weights, order, axis=-1)
        return ids, weights, collected
