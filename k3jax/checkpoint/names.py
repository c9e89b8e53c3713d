"""The released tensor names, and where each tensor lives in our model (SEMANTICS 2)."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

from k3jax.config import K3Config, LayerKind
from k3jax.model.layout import Segment, plan_segments

Layout = Literal["same", "matrix", "decay"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One released tensor.

    Attributes:
        released: its name, without the `language_model.` prefix.
        shape: its stored shape.
        variable: name of our variable (`named_variables`).
        index: leading indices inside that variable (repeat of a scanned unit, expert).
        layout: "matrix" is stored [out, in] and kept [in, out], heads as their own dimension;
            "decay" is flat, one entry per head, zero-padded; "same" keeps the element order.
    """

    released: str
    shape: tuple[int, ...]
    variable: str
    index: tuple[int, ...] = ()
    layout: Layout = "same"

    def matches(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of this shape can be placed here."""
        if self.layout == "decay":  # padded to any length, and 4-D in the previous family
            return int(np.prod(shape)) >= self.shape[0]
        return tuple(shape) == self.shape

    def to_ours(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The stored tensor as our array of `shape`.

        Raises:
            ValueError: a decay tensor with a non-zero tail, which means another layout.
        """
        if self.layout == "matrix":
            return stored.reshape(stored.shape[0], -1).T.reshape(shape)
        if self.layout == "decay":
            flat = stored.reshape(-1)
            tail = flat[shape[0] :]
            if np.any(tail != 0):
                raise ValueError(
                    f"{self.released}: entries from {shape[0]} on must be zero padding, found "
                    f"{tail[tail != 0][0]}; the decay is one value per head"
                )
            return flat[: shape[0]]
        return stored.reshape(shape)


def placements(cfg: K3Config) -> Iterator[Placement]:
    """Every text tensor of a checkpoint with this configuration, each exactly once."""
    width = cfg.dim
    yield _plain("model.embed_tokens.weight", (cfg.vocab_size, width), "language.embedding")
    yield _matrix("lm_head.weight", (cfg.vocab_size, width), "language.head")
    yield _plain("model.norm.weight", (width,), "language.norm.weight")
    if cfg.attention_residual_block is not None:
        yield from _mix("model.output_attn_res", width, "language.output_mix", ())
    for number, segment in enumerate(plan_segments(cfg.layer_kinds)):
        for repeat in range(segment.repeats):
            for position, kind in enumerate(segment.unit):
                layer = segment.layer_index(repeat, position)
                ours = f"language.stack.segments.{number}.layers.{position}"
                yield from _layer(cfg, kind, f"model.layers.{layer}", ours, _index(segment, repeat))


def _index(segment: Segment, repeat: int) -> tuple[int, ...]:
    return (repeat,) if segment.repeats > 1 else ()


def _matrix(released, shape, variable, index=()) -> Placement:
    return Placement(
        released=released, shape=shape, variable=variable, index=index, layout="matrix"
    )


def _plain(released, shape, variable, index=()) -> Placement:
    return Placement(released=released, shape=shape, variable=variable, index=index)


def _mix(released: str, width: int, ours: str, index) -> Iterator[Placement]:
    yield _plain(f"{released}_norm.weight", (width,), f"{ours}.norm", index)
    yield _plain(f"{released}_proj.weight", (1, width), f"{ours}.proj", index)


def _layer(cfg: K3Config, kind: LayerKind, released: str, ours: str, index) -> Iterator[Placement]:
    vector = (cfg.dim,)
    yield _plain(f"{released}.input_layernorm.weight", vector, f"{ours}.input_norm.weight", index)
    yield _plain(
        f"{released}.post_attention_layernorm.weight", vector, f"{ours}.post_norm.weight", index
    )
    if cfg.attention_residual_block is not None:
        yield from _mix(f"{released}.self_attention_res", cfg.dim, f"{ours}.attention_mix", index)
        yield from _mix(f"{released}.mlp_res", cfg.dim, f"{ours}.feed_forward_mix", index)
    attention = _kda if kind.attention == "kda" else _mla
    yield from attention(cfg, f"{released}.self_attn", f"{ours}.attention", index)
    if kind.feed_forward == "moe":
        yield from _moe(cfg, f"{released}.block_sparse_moe", f"{ours}.feed_forward", index)
    else:
        yield from _mlp(cfg.dim, cfg.ffn_dim, f"{released}.mlp", f"{ours}.feed_forward", index)


def _kda(cfg: K3Config, released: str, ours: str, index) -> Iterator[Placement]:
    heads, width, dim = cfg.kda.num_heads, cfg.kda.head_dim, cfg.dim
    channels = heads * width
    for letter in "qkv":
        yield _matrix(
            f"{released}.{letter}_proj.weight", (channels, dim), f"{ours}.{letter}_proj", index
        )
        yield _matrix(
            f"{released}.{letter}_conv1d.weight",
            (channels, 1, cfg.kda.conv_size),
            f"{ours}.{letter}_conv",
            index,
        )
    yield Placement(
        released=f"{released}.A_log",
        shape=(heads,),
        variable=f"{ours}.A_log",
        index=index,
        layout="decay",
    )
    yield _plain(f"{released}.dt_bias", (channels,), f"{ours}.dt_bias", index)
    yield _matrix(f"{released}.f_a_proj.weight", (width, dim), f"{ours}.f_a", index)
    yield _matrix(f"{released}.f_b_proj.weight", (channels, width), f"{ours}.f_b", index)
    yield _matrix(f"{released}.b_proj.weight", (heads, dim), f"{ours}.b_proj", index)
    if cfg.kda.full_rank_gate:
        yield _matrix(f"{released}.g_proj.weight", (channels, dim), f"{ours}.g_proj", index)
    else:
        yield _matrix(f"{released}.g_a_proj.weight", (width, dim), f"{ours}.g_a", index)
        yield _matrix(f"{released}.g_b_proj.weight", (channels, width), f"{ours}.g_b", index)
    yield _plain(f"{released}.o_norm.weight", (width,), f"{ours}.o_norm", index)
    yield _matrix(f"{released}.o_proj.weight", (dim, channels), f"{ours}.o_proj", index)


def _mla(cfg: K3Config, released: str, ours: str, index) -> Iterator[Placement]:
    mla, dim = cfg.mla, cfg.dim
    queries = mla.num_heads * mla.qk_head_dim
    values = mla.num_heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        yield _matrix(f"{released}.q_proj.weight", (queries, dim), f"{ours}.q_proj", index)
    else:
        rank = mla.q_lora_rank
        yield _matrix(f"{released}.q_a_proj.weight", (rank, dim), f"{ours}.q_a", index)
        yield _plain(f"{released}.q_a_layernorm.weight", (rank,), f"{ours}.q_norm.weight", index)
        yield _matrix(f"{released}.q_b_proj.weight", (queries, rank), f"{ours}.q_b", index)
    joint = mla.kv_lora_rank + mla.qk_rope_head_dim
    yield _matrix(f"{released}.kv_a_proj_with_mqa.weight", (joint, dim), f"{ours}.kv_a", index)
    yield _plain(
        f"{released}.kv_a_layernorm.weight", (mla.kv_lora_rank,), f"{ours}.kv_norm.weight", index
    )
    expanded = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield _matrix(
        f"{released}.kv_b_proj.weight", (expanded, mla.kv_lora_rank), f"{ours}.kv_b", index
    )
    if mla.output_gate:
        yield _matrix(f"{released}.g_proj.weight", (values, dim), f"{ours}.g_proj", index)
    yield _matrix(f"{released}.o_proj.weight", (dim, values), f"{ours}.o_proj", index)


def _mlp(dim: int, hidden: int, released: str, ours: str, index) -> Iterator[Placement]:
    yield _matrix(f"{released}.gate_proj.weight", (hidden, dim), f"{ours}.gate", index)
    yield _matrix(f"{released}.up_proj.weight", (hidden, dim), f"{ours}.up", index)
    yield _matrix(f"{released}.down_proj.weight", (dim, hidden), f"{ours}.down", index)


def _moe(cfg: K3Config, released: str, ours: str, index) -> Iterator[Placement]:
    moe, dim = cfg.moe, cfg.dim
    width, hidden = moe.latent_dim or dim, moe.expert_hidden_dim
    yield _matrix(f"{released}.gate.weight", (moe.num_experts, dim), f"{ours}.router", index)
    yield _plain(
        f"{released}.gate.e_score_correction_bias", (moe.num_experts,), f"{ours}.router_bias", index
    )
    if moe.latent_dim is not None:
        yield _matrix(
            f"{released}.routed_expert_down_proj.weight", (width, dim), f"{ours}.latent_down", index
        )
        if moe.latent_norm:
            yield _plain(
                f"{released}.routed_expert_norm.weight",
                (width,),
                f"{ours}.latent_norm.weight",
                index,
            )
        yield _matrix(
            f"{released}.routed_expert_up_proj.weight", (dim, width), f"{ours}.latent_up", index
        )
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * hidden
        yield from _mlp(dim, shared, f"{released}.shared_experts", f"{ours}.shared", index)
    for expert in range(moe.num_experts):
        own = (*index, expert)
        stem = f"{released}.experts.{expert}"
        yield _matrix(f"{stem}.w1.weight", (hidden, width), f"{ours}.expert_gate", own)
        yield _matrix(f"{stem}.w3.weight", (hidden, width), f"{ours}.expert_up", own)
        yield _matrix(f"{stem}.w2.weight", (width, hidden), f"{ours}.expert_down", own)
