"""The text model in float64 numpy, token by token, from tensors with their released names.

Written from the description of the model alone; shares no code with it. One unpadded sequence.
"""

import numpy as np

from k3jax.config import K3Config


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def normalize(x, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


class NumpyModel:
    """`run(tokens)` gives logits [T, W], and `chosen` the experts of each MoE layer."""

    def __init__(self, cfg: K3Config, tensors: dict[str, np.ndarray]):
        self.cfg = cfg
        self.tensors = {name: np.asarray(t, np.float64) for name, t in tensors.items()}

    def run(self, tokens):
        cfg, get = self.cfg, self.tensors.__getitem__
        self.chosen = []
        blocks, prefix = [], get("model.embed_tokens.weight")[tokens]
        for i in range(cfg.num_layers):
            name = f"model.layers.{i}"
            prefix = self._layer(i, name, blocks, prefix)
        if cfg.attention_residual_block:
            prefix = self._mix(blocks, prefix, "model.output_attn_res")
        hidden = normalize(prefix, cfg.norm_eps) * get("model.norm.weight")
        return hidden @ get("lm_head.weight").T

    def _layer(self, i, name, blocks, prefix):
        cfg = self.cfg
        attention = self._kda if i + 1 in cfg.kda_layers else self._mla
        moe = cfg.moe
        has_experts = moe and i >= moe.first_dense_layers and i % moe.layer_freq == 0
        size = cfg.attention_residual_block
        x = self._mix(blocks, prefix, f"{name}.self_attention_res") if blocks else prefix
        if size and i % size == 0:
            blocks.append(prefix)
            prefix = 0.0
        x = normalize(x, cfg.norm_eps) * self.tensors[f"{name}.input_layernorm.weight"]
        prefix = prefix + attention(x, f"{name}.self_attn")
        x = self._mix(blocks, prefix, f"{name}.mlp_res") if size else prefix
        x = normalize(x, cfg.norm_eps) * self.tensors[f"{name}.post_attention_layernorm.weight"]
        if has_experts:
            return prefix + self._moe(x, f"{name}.block_sparse_moe")
        return prefix + self._mlp(x, f"{name}.mlp")

    def _mix(self, blocks, current, name):
        rows = np.stack([*blocks, current])
        query = self.tensors[f"{name}_norm.weight"] * self.tensors[f"{name}_proj.weight"][0]
        weights = softmax(normalize(rows, self.cfg.norm_eps) @ query, axis=0)
        return (weights[..., None] * rows).sum(0)

    def _linear(self, x, name):
        return x @ self.tensors[f"{name}.weight"].T

    def _kda(self, x, name):
        kda, length = self.cfg.kda, len(x)
        heads, width = kda.num_heads, kda.head_dim

        def convolved(letter):
            u = self._linear(x, f"{name}.{letter}_proj")
            taps = self.tensors[f"{name}.{letter}_conv1d.weight"][:, 0]
            u = np.concatenate([np.zeros((kda.conv_size - 1, u.shape[1])), u])
            y = sum(u[j : j + length] * taps[:, j] for j in range(kda.conv_size))
            return (y * sigmoid(y)).reshape(length, heads, width)

        q, k, v = (convolved(letter) for letter in "qkv")
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * width**-0.5
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        z = self._linear(self._linear(x, f"{name}.f_a_proj"), f"{name}.f_b_proj")
        s = (z + self.tensors[f"{name}.dt_bias"]).reshape(length, heads, width)
        rate = np.exp(self.tensors[f"{name}.A_log"].reshape(-1)[:heads])[:, None]
        if kda.gate_lower_bound is None:
            decay = -rate * np.logaddexp(0, s)
        else:
            decay = kda.gate_lower_bound * sigmoid(rate * s)
        beta = sigmoid(self._linear(x, f"{name}.b_proj"))
        state = np.zeros((heads, width, width))
        output = np.zeros((length, heads, width))
        for t in range(length):
            state = np.exp(decay[t])[..., None] * state
            update = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][..., None] * update[:, None]
            output[t] = np.einsum("hkv,hk->hv", state, q[t])
        if kda.full_rank_gate:
            gate = self._linear(x, f"{name}.g_proj")
        else:
            gate = self._linear(self._linear(x, f"{name}.g_a_proj"), f"{name}.g_b_proj")
        output = normalize(output, self.cfg.norm_eps) * self.tensors[f"{name}.o_norm.weight"]
        return self._linear(output.reshape(length, -1) * sigmoid(gate), f"{name}.o_proj")

    def _mla(self, x, name):
        mla, length = self.cfg.mla, len(x)
        nope, rank = mla.qk_nope_head_dim, mla.kv_lora_rank
        if mla.q_lora_rank is None:
            q = self._linear(x, f"{name}.q_proj")
        else:
            low = normalize(self._linear(x, f"{name}.q_a_proj"), 1e-6)
            low = low * self.tensors[f"{name}.q_a_layernorm.weight"]
            q = self._linear(low, f"{name}.q_b_proj")
        q = q.reshape(length, mla.num_heads, -1)
        joint = self._linear(x, f"{name}.kv_a_proj_with_mqa")
        latent = normalize(joint[:, :rank], 1e-6) * self.tensors[f"{name}.kv_a_layernorm.weight"]
        expanded = self._linear(latent, f"{name}.kv_b_proj").reshape(length, mla.num_heads, -1)
        scores = np.einsum("thn,shn->hts", q[..., :nope], expanded[..., :nope])
        scores = scores + np.einsum("thr,sr->hts", q[..., nope:], joint[:, rank:])
        scores = scores * q.shape[-1] ** -0.5
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        output = np.einsum("hts,shv->thv", softmax(scores), expanded[..., nope:])
        output = output.reshape(length, -1)
        if mla.output_gate:
            output = output * sigmoid(self._linear(x, f"{name}.g_proj"))
        return self._linear(output, f"{name}.o_proj")

    def _activate(self, a, b):
        cfg = self.cfg
        if cfg.activation == "silu":
            return a * sigmoid(a) * b
        if cfg.situ_linear_beta is not None:
            b = cfg.situ_linear_beta * np.tanh(b / cfg.situ_linear_beta)
        return cfg.situ_beta * np.tanh(a / cfg.situ_beta) * sigmoid(a) * b

    def _mlp(self, x, name, names=("gate_proj", "up_proj", "down_proj")):
        gate, up, down = (f"{name}.{n}" for n in names)
        return self._linear(self._activate(self._linear(x, gate), self._linear(x, up)), down)

    def _moe(self, x, name):
        moe = self.cfg.moe
        logits = self._linear(x, f"{name}.gate")
        scores = softmax(logits) if moe.router_activation == "softmax" else sigmoid(logits)
        biased = scores + self.tensors[f"{name}.gate.e_score_correction_bias"]
        if moe.num_expert_groups > 1 and moe.topk_groups < moe.num_expert_groups:
            groups = biased.reshape(len(x), moe.num_expert_groups, -1)
            strength = np.sort(groups, axis=-1)[..., -2:].sum(-1)
            best = np.argsort(-strength, axis=-1)[:, : moe.topk_groups]
            outside = np.ones(groups.shape, bool)
            np.put_along_axis(outside, best[..., None], False, axis=1)
            biased = np.where(outside, -np.inf, groups).reshape(biased.shape)
        ids = np.sort(np.argsort(-biased, axis=-1)[:, : moe.experts_per_token], axis=-1)
        self.chosen.append(ids)
        weights = np.take_along_axis(scores, ids, axis=-1)
        if moe.experts_per_token > 1 and moe.renormalize:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        weights = weights * moe.routed_scaling_factor
        z = x if moe.latent_dim is None else self._linear(x, f"{name}.routed_expert_down_proj")
        out = np.zeros_like(z)
        for t, r in np.ndindex(*ids.shape):
            expert = f"{name}.experts.{ids[t, r]}"
            out[t] += weights[t, r] * self._mlp(z[t], expert, ("w1", "w3", "w2"))
        if moe.latent_dim is not None:
            if moe.latent_norm:
                out = normalize(out, self.cfg.norm_eps)
                out = out * self.tensors[f"{name}.routed_expert_norm.weight"]
            out = self._linear(out, f"{name}.routed_expert_up_proj")
        if moe.num_shared_experts:
            out = out + self._mlp(x, f"{name}.shared_experts")
        return out
