"""The released `config.json`: what is read, what is refused, and what is written back."""

import copy
import dataclasses
import json
import os
from pathlib import Path

import pytest

from k3jax.config import ConfigError, K3Config
from k3jax.config.keys import LAYOUT

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_CONFIGS = sorted(GOLDEN.glob("*/config.json"))
K3_FILE = GOLDEN / "text_small" / "config.json"
VISION_FILE = GOLDEN / "vision_small" / "config.json"
LINEAR_FILE = GOLDEN / "kimi_linear" / "config.json"


def k3_document() -> dict:
    return json.loads(K3_FILE.read_text())


def text_of(document: dict) -> dict:
    return document.get("text_config", document)


def released_metadata() -> Path:
    folder = os.environ.get("K3JAX_RELEASED_METADATA")
    if not folder:
        pytest.skip("K3JAX_RELEASED_METADATA does not name the folder of the released metadata")
    return Path(folder)


@pytest.mark.parametrize("file", GOLDEN_CONFIGS, ids=lambda file: file.parent.name)
def test_golden_config_comes_back_as_the_same_json(file):
    cfg = K3Config.from_hf(file)
    assert cfg.to_hf() == json.loads(file.read_text())
    assert json.dumps(cfg.to_hf()) == json.dumps(json.loads(file.read_text()))  # key order, too
    assert K3Config.from_hf(file.parent) == cfg


@pytest.mark.parametrize("file", GOLDEN_CONFIGS, ids=lambda file: file.parent.name)
def test_config_without_its_file_writes_a_complete_one(file):
    cfg = K3Config.from_hf(file)
    bare = dataclasses.replace(cfg, source_json="")
    assert bare == cfg and hash(bare) == hash(cfg)
    written = bare.to_hf()
    assert K3Config.from_hf_dict(written) == cfg
    assert K3Config.from_hf_dict(json.loads(json.dumps(written))) == cfg


def test_released_config_comes_back_as_the_same_json_and_equals_the_preset():
    file = released_metadata() / "config.json"
    cfg = K3Config.from_hf(file)
    assert cfg.to_hf() == json.loads(file.read_text())
    assert cfg == K3Config.kimi_k3()


def test_fields_are_read_from_their_keys():
    cfg = K3Config.from_hf(VISION_FILE)
    assert (cfg.model_type, cfg.dim, cfg.ffn_dim, cfg.vocab_size) == ("kimi_k3", 64, 64, 96)
    assert cfg.kda_layers == (1, 2, 4) and cfg.full_attention_layers == (3, 5)
    assert (cfg.situ_beta, cfg.situ_linear_beta) == (3.0, 8.0)
    assert cfg.attention_residual_block == 2 and cfg.num_blocks == 3
    assert (cfg.kda.gate_lower_bound, cfg.kda.full_rank_gate) == (-5.0, True)
    assert (cfg.mla.qk_head_dim, cfg.mla.latent_norm_eps) == (24, 1e-6)
    assert (cfg.moe.latent_dim, cfg.moe.latent_norm) == (32, True)
    assert (cfg.bos_id, cfg.eos_id, cfg.pad_id, cfg.media_placeholder_id) == (88, 89, 95, 91)
    assert (cfg.vision.head_dim, cfg.vision.position_rows, cfg.vision.max_frames) == (16, 6, 4)


def test_kimi_linear_omissions_mean_what_the_family_means():
    cfg = K3Config.from_hf(LINEAR_FILE)
    assert (cfg.situ_beta, cfg.situ_linear_beta) == (1.0, None)
    assert cfg.attention_residual_block is None and cfg.num_blocks == 0
    assert cfg.kda.gate_lower_bound is None and not cfg.kda.full_rank_gate
    assert cfg.mla.q_lora_rank is None and not cfg.mla.output_gate
    assert cfg.moe.latent_dim is None and cfg.moe.routed_scaling_factor == 2.446


def test_kimi_linear_takes_its_length_limit_from_model_max_length():
    document = json.loads(LINEAR_FILE.read_text())
    del document["max_position_embeddings"]
    document["model_max_length"] = 2048
    document |= {"head_dim": 72, "rope_theta": 10000.0, "rope_scaling": None}
    cfg = K3Config.from_hf_dict(document)
    assert cfg.max_position == 2048
    assert cfg.to_hf() == document


def _required_keys() -> list[tuple[tuple[str, ...], str]]:
    return [
        (section.path, key.name)
        for section in LAYOUT["kimi_k3"]
        for key in section.keys
        if not key.optional
    ]


@pytest.mark.parametrize(("path", "name"), _required_keys(), ids=lambda part: str(part))
def test_missing_k3_key_is_an_error_that_names_it(path, name):
    document = json.loads(VISION_FILE.read_text())
    section = document
    for part in path:
        section = section[part]
    del section[name]
    with pytest.raises(ConfigError, match=rf"missing key '{'.'.join((*path, name))}'"):
        K3Config.from_hf_dict(document)


@pytest.mark.parametrize(
    "name", ["hidden_size", "kv_lora_rank", "rms_norm_eps", "num_experts_per_token", "hidden_act"]
)
def test_missing_kimi_linear_key_that_k3_shares_is_an_error(name):
    document = json.loads(LINEAR_FILE.read_text())
    del document[name]
    with pytest.raises(ConfigError, match=rf"missing key '{name}'"):
        K3Config.from_hf_dict(document)


def test_missing_keys_are_reported_together():
    document = k3_document()
    for name in ("activation_situ_beta", "routed_expert_hidden_size"):
        del document["text_config"][name]
    del document["text_config"]["linear_attn_config"]["full_attn_layers"]
    with pytest.raises(ConfigError) as error:
        K3Config.from_hf_dict(document)
    for name in ("activation_situ_beta", "routed_expert_hidden_size", "full_attn_layers"):
        assert name in str(error.value)


def test_missing_sections_are_errors():
    for part in ("text_config", "linear_attn_config"):
        document = k3_document()
        del (document if part == "text_config" else document["text_config"])[part]
        with pytest.raises(ConfigError, match=part):
            K3Config.from_hf_dict(document)


def test_absent_gate_bound_selects_the_unbounded_gate():
    document = k3_document()
    del document["text_config"]["linear_attn_config"]["gate_lower_bound"]
    cfg = K3Config.from_hf_dict(document)
    assert cfg.kda.gate_lower_bound is None
    assert cfg.to_hf() == document


def test_renamed_key_is_an_error_that_names_the_nearest_one():
    document = k3_document()
    text = document["text_config"]
    text["activation_situ_betta"] = text.pop("activation_situ_beta")
    with pytest.raises(ConfigError) as error:
        K3Config.from_hf_dict(document)
    message = str(error.value)
    assert "missing key 'text_config.activation_situ_beta'" in message
    assert "unknown key 'text_config.activation_situ_betta'" in message
    assert "nearest known key is 'text_config.activation_situ_beta'" in message


def test_key_of_another_section_is_an_error_that_names_its_place():
    document = k3_document()
    document["kv_lora_rank"] = 16
    with pytest.raises(ConfigError, match=r"known key is 'text_config\.kv_lora_rank'"):
        K3Config.from_hf_dict(document)


def test_allowed_unknown_key_warns_and_is_written_back():
    document = k3_document()
    document["text_config"]["linear_attn_config"]["gate_lower_bond"] = -4.0
    with pytest.warns(UserWarning, match="gate_lower_bond.*gate_lower_bound"):
        cfg = K3Config.from_hf_dict(document, allow_unknown=True)
    assert cfg.to_hf() == document
    assert cfg == K3Config.from_hf(K3_FILE)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hidden_size", "64", "an integer"),
        ("hidden_size", 64.0, "an integer"),
        ("hidden_size", True, "an integer"),
        ("hidden_size", None, "an integer"),
        ("rms_norm_eps", "1e-5", "a finite number"),
        ("rms_norm_eps", float("nan"), "a finite number"),
        ("moe_renormalize", 1, "true or false"),
        ("hidden_act", 3, "a string"),
    ],
)
def test_wrong_type_is_an_error_that_names_key_and_type(name, value, expected):
    document = k3_document()
    document["text_config"][name] = value
    with pytest.raises(ConfigError, match=rf"text_config\.{name}=.* must be {expected}"):
        K3Config.from_hf_dict(document)


def test_layer_list_of_strings_is_an_error():
    document = k3_document()
    document["text_config"]["linear_attn_config"]["kda_layers"] = ["1", "2"]
    with pytest.raises(ConfigError, match=r"kda_layers=.* must be a list of integers"):
        K3Config.from_hf_dict(document)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("mla_use_nope", False),
        ("tie_word_embeddings", True),
        ("topk_method", "greedy"),
        ("num_nextn_predict_layers", 1),
        ("moe_router_activation_func", "tanh"),
    ],
)
def test_value_that_is_not_implemented_is_an_error(name, value):
    document = k3_document()
    document["text_config"][name] = value
    with pytest.raises(ConfigError, match=rf"text_config\.{name}=.* is not implemented"):
        K3Config.from_hf_dict(document)


def test_contradictions_are_errors():
    document = k3_document()
    document["text_config"]["num_key_value_heads"] = 2
    document["pad_token_id"] = 126
    document["text_config"]["model_type"] = "llama"
    with pytest.raises(ConfigError) as error:
        K3Config.from_hf_dict(document)
    message = str(error.value)
    assert "num_key_value_heads=2 must equal text_config.num_attention_heads=4" in message
    assert "text_config.pad_token_id=127 must equal pad_token_id=126" in message
    assert "text_config.model_type='llama' must be 'kimi_linear'" in message


def test_grouped_selection_switched_off_contradicts_groups():
    document = json.loads((GOLDEN / "kimi_linear_groups" / "config.json").read_text())
    document["use_grouped_topk"] = False
    with pytest.raises(ConfigError, match="use_grouped_topk=False contradicts"):
        K3Config.from_hf_dict(document)


def test_vision_needs_its_placeholder_token_and_the_text_width():
    document = json.loads(VISION_FILE.read_text())
    del document["media_placeholder_token_id"]
    document["vision_config"]["text_hidden_size"] = 32
    with pytest.raises(ConfigError) as error:
        K3Config.from_hf_dict(document)
    assert "missing key 'media_placeholder_token_id'" in str(error.value)
    assert "vision_config.text_hidden_size=32 must equal text_config.hidden_size=64" in str(
        error.value
    )


def test_wrong_layer_partition_is_an_error_that_names_the_file(tmp_path):
    document = k3_document()
    document["text_config"]["linear_attn_config"]["kda_layers"] = [1, 2, 3, 4, 6]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"config\.json.*\n.*missing \[5\], repeated \[4\]"):
        K3Config.from_hf(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not a valid JSON file"),
        ("[]", "expected a JSON object"),
        ("{}", "model_type=None is not a known family"),
        ('{"model_type": "llama"}', "model_type='llama' is not a known family"),
        ('{"model_type": ["kimi_k3"]}', "is not a known family"),
        ('{"model_type": "kimi_k3", "model_type": "kimi_k3"}', "stands twice"),
        ('{"model_type": "kimi_k3", "x": NaN}', "NaN is not a JSON number"),
    ],
)
def test_file_that_is_no_configuration_is_an_error(tmp_path, text, expected):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        K3Config.from_hf(tmp_path)
    assert expected in str(error.value) and str(tmp_path) in str(error.value)


def test_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        K3Config.from_hf(tmp_path)


def test_replaced_fields_show_in_the_written_file():
    cfg = K3Config.from_hf(VISION_FILE)
    changed = dataclasses.replace(
        cfg,
        dim=128,
        pad_id=90,
        kda=dataclasses.replace(cfg.kda, gate_lower_bound=None),
        mla=dataclasses.replace(cfg.mla, num_heads=3),
    )
    written = changed.to_hf()
    text = written["text_config"]
    assert text["hidden_size"] == written["vision_config"]["text_hidden_size"] == 128
    assert written["pad_token_id"] == text["pad_token_id"] == 90
    assert text["linear_attn_config"]["gate_lower_bound"] is None
    assert text["num_attention_heads"] == text["num_key_value_heads"] == 3
    assert written["image_placeholder"] == "<|kimi_image_placeholder|>"
    assert K3Config.from_hf_dict(written) == changed


def test_removed_parts_show_in_the_written_file():
    cfg = K3Config.from_hf(VISION_FILE)
    text_only = dataclasses.replace(cfg, vision=None, moe=None)
    written = text_only.to_hf()
    assert "vision_config" not in written
    assert written["text_config"]["num_experts"] is None
    assert K3Config.from_hf_dict(written) == text_only


def test_key_that_a_file_omits_is_added_only_when_its_meaning_changed():
    cfg = K3Config.from_hf(LINEAR_FILE)
    written = dataclasses.replace(cfg, attention_residual_block=2).to_hf()
    added = written.keys() - json.loads(LINEAR_FILE.read_text()).keys()
    assert added == {"attn_res_block_size"}


def test_other_family_gets_a_new_file():
    cfg = K3Config.from_hf(LINEAR_FILE)
    as_k3 = dataclasses.replace(cfg, model_type="kimi_k3")
    written = as_k3.to_hf()
    assert written["text_config"]["hidden_size"] == 48
    assert K3Config.from_hf_dict(written) == as_k3


def test_null_for_an_unused_k3_key_is_read_as_absent_and_kept():
    document = json.loads(LINEAR_FILE.read_text()) | {"activation_situ_beta": None}
    cfg = K3Config.from_hf_dict(document)
    assert cfg.situ_beta == 1.0
    assert cfg.to_hf() == document


def test_latent_norm_epsilon_that_no_file_can_state_is_refused():
    cfg = K3Config.tiny()
    changed = dataclasses.replace(cfg, mla=dataclasses.replace(cfg.mla, latent_norm_eps=1e-5))
    with pytest.raises(ValueError, match="latent_norm_eps=1e-05 cannot be written"):
        changed.to_hf()


def test_reading_does_not_change_the_document():
    document = k3_document()
    before = copy.deepcopy(document)
    K3Config.from_hf_dict(document).to_hf()["text_config"]["hidden_size"] = 1
    assert document == before
