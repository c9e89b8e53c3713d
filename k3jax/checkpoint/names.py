"""The released tensor names, and where each tensor lives in our model."""

import dataclasses
import functools
import json
from collections.abc import Iterator

from k3jax.checkpoint.folder import PREFIX
from k3jax.checkpoint.placement import Placement
from k3jax.checkpoint.vision_names import vision_placements
from k3jax.config import K3Config, LayerKind
from k3jax.config.hf_writer import STORED_SHAPES
from k3jax.model.layout import Segment, plan_segments
from pallas_kernels.mxfp4 import GROUP


def placements(cfg: K3Config, *, packed: bool = False) -> Iterator[Placement]:
    """Every tensor of a checkpoint with this configuration, each exactly once.

    Args:
        cfg: the model; the text model alone when `cfg.vision` is None.
        packed: routed experts are MXFP4 codes and scales, in `PackedMatrix` variables.
    """
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
                index = _index(segment, repeat)
                yield from _layer(cfg, kind, f"model.layers.{layer}", ours, index)
                if kind.feed_forward == "moe":
                    stem = f"model.layers.{layer}.block_sparse_moe.experts"
                    yield from _experts(cfg, stem, f"{ours}.feed_forward", index, packed)
    yield from vision_placements(cfg)


def released_name(cfg: K3Config, name: str) -> str:
    """The full name of a tensor in a checkpoint of this family: K3 puts a prefix on text names."""
    is_text = name.startswith(("model.", "lm_head."))
    return PREFIX + name if is_text and cfg.model_type == "kimi_k3" else name


def decay_shape(cfg: K3Config) -> tuple[int, ...]:
    """Stored shape of the decay: that of the file it came from, else what the release has."""
    stored = _stored_decay_shape(cfg.source_json)
    if stored is not None:
        return stored
    if cfg.model_type == "kimi_k3":
        return (max(cfg.kda.num_heads, cfg.kda.head_dim),)
    return (cfg.kda.num_heads,)


def with_decay_shape(cfg: K3Config, shape: tuple[int, ...]) -> K3Config:
    """The same model, whose decay is stored in this shape: its padding differs between files."""
    if shape == decay_shape(cfg):
        return cfg
    document = json.loads(cfg.source_json) if cfg.source_json else cfg.to_hf()
    document[STORED_SHAPES] = {"A_log": list(shape)}
    return dataclasses.replace(cfg, source_json=json.dumps(document))


@functools.cache
def _stored_decay_shape(source_json: str) -> tuple[int, ...] | None:
    stored = json.loads(source_json).get(STORED_SHAPES) if source_json else None
    return None if stored is None else tuple(stored["A_log"])


def _index(segment: Segment, repeat: int) -> tuple[int, ...]:
    return (repeat,) if segment.repeats > 1 else ()


def _matrix(released, shape, variable, index=(), dtype="BF16") -> Placement:
    return Placement(
        released=released, shape=shape, variable=variable, index=index, layout="matrix", dtype=dtype
    )


def _plain(released, shape, variable, index=(), dtype="BF16") -> Placement:
    return Placement(released=released, shape=shape, variable=variable, index=index, dtype=dtype)


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
            "F32",
        )
    yield Placement(
        released=f"{released}.A_log",
        shape=decay_shape(cfg),
        variable=f"{ours}.A_log",
        index=index,
        layout="decay",
        dtype="F32",
        num_heads=heads,
    )
    yield _plain(f"{released}.dt_bias", (channels,), f"{ours}.dt_bias", index, "F32")
    yield _matrix(f"{released}.f_a_proj.weight", (width, dim), f"{ours}.f_a", index)
    yield _matrix(f"{released}.f_b_proj.weight", (channels, width), f"{ours}.f_b", index)
    yield _matrix(f"{released}.b_proj.weight", (heads, dim), f"{ours}.b_proj", index)
    if cfg.kda.full_rank_gate:
        yield _matrix(f"{released}.g_proj.weight", (channels, dim), f"{ours}.g_proj", index)
    else:
        yield _matrix(f"{released}.g_a_proj.weight", (width, dim), f"{ours}.g_a", index)
        yield _matrix(f"{released}.g_b_proj.weight", (channels, width), f"{ours}.g_b", index)
    yield _plain(f"{released}.o_norm.weight", (width,), f"{ours}.o_norm", index, "F32")
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
    """All of a block with experts but the routed experts themselves."""
    moe, dim = cfg.moe, cfg.dim
    yield _matrix(f"{released}.gate.weight", (moe.num_experts, dim), f"{ours}.router", index)
    yield _plain(
        f"{released}.gate.e_score_correction_bias",
        (moe.num_experts,),
        f"{ours}.router_bias",
        index,
        "F32",
    )
    if moe.latent_dim is not None:
        stem, width = f"{released}.routed_expert", moe.latent_dim
        yield _matrix(f"{stem}_down_proj.weight", (width, dim), f"{ours}.latent_down", index)
        if moe.latent_norm:
            yield _plain(f"{stem}_norm.weight", (width,), f"{ours}.latent_norm.weight", index)
        yield _matrix(f"{stem}_up_proj.weight", (dim, width), f"{ours}.latent_up", index)
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * moe.expert_hidden_dim
        yield from _mlp(dim, shared, f"{released}.shared_experts", f"{ours}.shared", index)


def _experts(cfg: K3Config, released: str, ours: str, index, packed: bool) -> Iterator[Placement]:
    """The routed experts: w1 is the gate, w3 the up and w2 the down matrix."""
    moe = cfg.moe
    width, hidden = moe.latent_dim or cfg.dim, moe.expert_hidden_dim
    matrices = (
        ("w1", "expert_gate", hidden, width),
        ("w3", "expert_up", hidden, width),
        ("w2", "expert_down", width, hidden),
    )
    for expert in range(moe.num_experts):
        own = (*index, expert)
        for letter, name, out, into in matrices:
            stem, variable = f"{released}.{expert}.{letter}.weight", f"{ours}.{name}"
            if packed:
                codes, scales = (out, into // 2), (out, into // GROUP)
                yield _plain(f"{stem}_packed", codes, f"{variable}.codes", own, "U8")
                yield _plain(f"{stem}_scale", scales, f"{variable}.scales", own, "U8")
            else:
                yield _matrix(stem, (out, into), variable, own)
