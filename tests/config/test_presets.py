"""Named sizes: the facts of the released models, and what the small ones must contain."""

import dataclasses
import hashlib
import json

import pytest

from k3jax.config import K3Config
from k3jax.config.presets import PRESETS
from k3jax.plan import count_parameters

# SHA-256 of the architecture that the released config.json states, so that the preset is checked
# on machines that do not have the file (test_hf compares with the file itself).
KIMI_K3_DIGEST = "11a54160aab4f33316d4b8aee81ccfc0891bcb515cd89ab8ab9caad089033649"


def architecture_digest(cfg: K3Config) -> str:
    fields = dataclasses.asdict(cfg)
    del fields["source_json"]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def test_kimi_k3_has_the_digest_of_the_released_architecture():
    assert architecture_digest(K3Config.kimi_k3()) == KIMI_K3_DIGEST


def test_kimi_k3_layers_are_those_of_the_release():
    cfg = K3Config.kimi_k3()
    attention = [kind.attention for kind in cfg.layer_kinds]
    mla = [i for i, kind in enumerate(attention) if kind == "mla"]
    assert mla == [*range(3, 92, 4), 92] and len(mla) == 24
    assert attention.count("kda") == 69
    assert [i for i, kind in enumerate(cfg.layer_kinds) if kind.feed_forward == "dense"] == [0]
    assert cfg.num_moe_layers == 92 and cfg.num_blocks == 8


def test_kimi_linear_48b_is_48b_with_3b_active():
    cfg = K3Config.kimi_linear_48b()
    counts = count_parameters(cfg)
    assert 48e9 < counts.text.total < 50e9
    assert 3.0e9 < counts.text_without_embedding.active < 3.5e9
    assert cfg.model_type == "kimi_linear" and len(cfg.kda_layers) == 20


def test_small_trains_on_one_accelerator():
    counts = count_parameters(K3Config.small())
    assert 150e6 <= counts.text.active <= 300e6
    # float32 weights, gradients and two moments
    assert counts.text.total * 16 < 40e9


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_training_preset_contains_every_mechanism(name):
    cfg = PRESETS[name]()
    assert cfg.kda_layers and cfg.full_attention_layers
    assert cfg.kda.gate_lower_bound == -5.0 and cfg.kda.full_rank_gate
    assert cfg.mla.q_lora_rank and cfg.mla.output_gate
    assert cfg.num_layers % cfg.attention_residual_block, "the last block must be partial"
    assert cfg.moe.latent_dim and cfg.moe.latent_norm and cfg.moe.num_shared_experts
    assert {kind.feed_forward for kind in cfg.layer_kinds} == {"dense", "moe"}
    assert cfg.moe.num_experts > 8, "more experts than the simulated ranks"
    assert cfg.activation == "situ" and cfg.vocab_size == 512


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_hashable_and_comes_back_from_its_file(name):
    cfg = PRESETS[name]()
    assert getattr(K3Config, name)() == cfg
    assert hash(PRESETS[name]()) == hash(cfg)
    assert K3Config.from_hf_dict(json.loads(json.dumps(cfg.to_hf()))) == cfg
