"""Dataclasses of the configuration: derived facts and refused values."""

import dataclasses

import pytest

from k3jax.config import K3Config, LayerKind


def test_layer_kinds_follow_lists_first_dense_and_frequency():
    cfg = K3Config.tiny()
    moe = dataclasses.replace(cfg.moe, first_dense_layers=2, layer_freq=3)
    kinds = dataclasses.replace(cfg, moe=moe).layer_kinds
    assert [i for i, kind in enumerate(kinds) if kind.feed_forward == "moe"] == [3, 6]
    assert kinds[3] == LayerKind(attention="mla", feed_forward="moe")
    assert kinds[2] == LayerKind(attention="kda", feed_forward="dense")


@pytest.mark.parametrize(
    ("num_layers", "block", "expected"), [(9, 4, 3), (8, 4, 2), (9, None, 0), (9, 12, 1)]
)
def test_num_blocks_counts_the_partial_one(num_layers, block, expected):
    cfg = dataclasses.replace(
        K3Config.tiny(),
        num_layers=num_layers,
        kda_layers=range(1, num_layers),
        full_attention_layers=[num_layers],
        attention_residual_block=block,
    )
    assert cfg.num_blocks == expected
    assert isinstance(cfg.kda_layers, tuple) and isinstance(hash(cfg), int)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("", {"dim": 0}, "config.dim=0 must be positive"),
        ("", {"activation": "gelu"}, "activation='gelu'"),
        ("", {"model_type": "llama"}, "model_type='llama'"),
        ("", {"bos_id": 512}, "bos_id=512 is outside vocab_size=512"),
        ("", {"pad_id": -1}, "pad_id=-1 is outside"),
        ("", {"situ_beta": 0.0}, "situ_beta=0.0 must be positive"),
        ("", {"kda_layers": (1, 2)}, r"missing \[3, 5, 6, 7\], repeated \[\], out of range \[\]"),
        ("", {"full_attention_layers": (4, 8, 9, 10)}, r"out of range \[10\]"),
        ("", {"model_type": "kimi_linear", "media_placeholder_id": 3}, "has no vision tower"),
        ("kda", {"gate_lower_bound": 0.0}, "gate_lower_bound=0.0 must be below 0"),
        ("kda", {"head_dim": -1}, "kda.head_dim=-1 must be positive"),
        ("mla", {"qk_rope_head_dim": -8}, "mla.qk_rope_head_dim=-8 must not be negative"),
        ("moe", {"experts_per_token": 16}, "experts_per_token=16 must be below num_experts=16"),
        ("moe", {"num_expert_groups": 3}, "num_experts=16 is not divisible"),
        ("moe", {"num_expert_groups": 2, "topk_groups": 3}, "topk_groups=3 exceeds"),
        ("moe", {"num_expert_groups": 16}, "leaves 1 of num_experts=16 per group"),
        ("moe", {"num_expert_groups": 8, "experts_per_token": 3}, "hold fewer than"),
        ("moe", {"router_activation": "tanh"}, "router_activation='tanh'"),
        ("moe", {"num_shared_experts": -1}, "num_shared_experts=-1 must not be negative"),
        ("vision", {"merge_size": (1, 1)}, r"merge_size=\(1, 1\) must be \(2, 2\)"),
        ("vision", {"num_heads": 7}, "qkv_dim=1536 must be num_heads=7 heads"),
        ("vision", {"projector_dim": 8}, "projector_dim=8 must equal the tower's dim=1024"),
    ],
)
def test_impossible_value_is_an_error_that_names_it(part, change, message):
    cfg = K3Config.kimi_k3() if part == "vision" else K3Config.tiny()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(getattr(cfg, part) if part else cfg, **change)


def test_file_of_origin_takes_no_part_in_equality():
    cfg = K3Config.tiny()
    read = K3Config.from_hf_dict(cfg.to_hf())
    assert read.source_json and not cfg.source_json
    assert read == cfg and hash(read) == hash(cfg)
    assert dataclasses.replace(read, norm_eps=1e-6) != cfg
