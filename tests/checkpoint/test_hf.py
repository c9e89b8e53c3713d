"""Checkpoints in the released layout: every accepted form, and every fault by name."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import k3jax
from k3jax.checkpoint.convert import convert_hf
from k3jax.checkpoint.hf import CheckpointError
from k3jax.errors import UserError
from k3jax.nn.parameters import named_variables
from tests.released_files import copy_checkpoint, random_tensors, stored_bytes, write_checkpoint
from tests.small_configs import pattern_config, previous_family, two_layers

A_LOG = "model.layers.0.self_attn.A_log"


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(two_layers())


def assert_same_model(model, other):
    assert jax.tree.structure(model) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, model, other)


def test_single_file_index_prefix_and_none_give_the_same_model(tensors, tmp_path):
    cfg = two_layers()
    expected = k3jax.load_hf(write_checkpoint(tmp_path / "a", cfg, tensors))
    for name, options in {
        "b": {"prefix": "language_model."},
        "c": {"shards": 3},
        "d": {"shards": 2, "prefix": "language_model."},
    }.items():
        folder = write_checkpoint(tmp_path / name, cfg, tensors, **options)
        assert_same_model(k3jax.load_hf(folder), expected)
    # Several files without an index.
    (folder / "model.safetensors.index.json").unlink()
    assert_same_model(k3jax.load_hf(folder), expected)


def test_every_tensor_lands_in_its_place(tmp_path):
    """Repeats of a scanned unit and experts are told apart, matrices are transposed."""
    cfg = pattern_config("KKMKMKM", block=2)
    tensors = random_tensors(cfg)
    model = k3jax.load_hf(write_checkpoint(tmp_path, cfg, tensors))
    assert sum(v.size for v in jax.tree.leaves(model)) == sum(
        2 if name.endswith("A_log") else t.size for name, t in tensors.items()
    )
    for repeat in range(3):
        layer = model.language.stack.segments[1].layers[1]  # the M of (K M) x 3
        stem = f"model.layers.{2 + 2 * repeat}"
        expert = tensors[f"{stem}.block_sparse_moe.experts.4.w2.weight"]
        np.testing.assert_array_equal(layer.feed_forward.expert_down[repeat, 4], expert.T)
        kv_b = tensors[f"{stem}.self_attn.kv_b_proj.weight"].T.reshape(7, 3, 11)
        np.testing.assert_array_equal(layer.attention.kv_b[repeat], kv_b)
        proj = tensors[f"{stem}.mlp_res_proj.weight"][0]
        np.testing.assert_array_equal(layer.feed_forward_mix.proj[repeat], proj)


@pytest.mark.parametrize("shape", [(2,), (8,), (1, 1, 2, 1), (1, 1, 8, 1)])
def test_decay_is_one_value_per_head_in_any_stored_shape(shape, tmp_path):
    cfg = previous_family()
    tensors = random_tensors(cfg)
    values = np.zeros(shape, np.float32)
    values.reshape(-1)[:2] = [0.25, -1.5]
    tensors[A_LOG] = values
    model = k3jax.load_hf(write_checkpoint(tmp_path, cfg, tensors))
    layer = model.language.stack.segments[0].layers[0].attention
    np.testing.assert_array_equal(layer.A_log[...], [0.25, -1.5])


def test_decay_with_a_value_in_its_tail_is_refused(tensors, tmp_path):
    values = tensors[A_LOG].copy()
    values[-1] = 0.1
    folder = write_checkpoint(tmp_path, two_layers(), tensors | {A_LOG: values})
    with pytest.raises(CheckpointError, match=r"A_log: entries from 2 on must be zero.*0\.1"):
        k3jax.load_hf(folder)


def test_all_faults_are_reported_together(tensors, tmp_path):
    changed = dict(tensors)
    del changed["model.norm.weight"]
    changed["model.layers.2.self_attn.q_proj.weight"] = np.zeros((2, 2), np.float32)
    changed["vision_tower.final_layernorm.weight"] = np.zeros((2,), np.float32)
    changed["lm_head.weight"] = tensors["lm_head.weight"].T
    changed["model.layers.1.self_attn.o_proj.weight"] = np.zeros((24, 15), np.int8)
    changed[A_LOG] = np.ones((8,), np.float32)
    changed["model.layers.0.self_attn.dt_bias"] = np.zeros((2,), np.float32)
    folder = write_checkpoint(tmp_path, two_layers(), changed)
    with pytest.raises(CheckpointError) as caught:
        k3jax.load_hf(folder)
    message = str(caught.value)
    assert "7 tensors do not fit" in message
    for part in (
        "missing: model.norm.weight",
        "unknown: model.layers.2.self_attn.q_proj.weight",
        "unknown: vision_tower.final_layernorm.weight (vision is not supported",
        "shape: lm_head.weight is [24, 40], expected [40, 24]",
        "type: model.layers.1.self_attn.o_proj.weight is I8",
        "value: model.layers.0.self_attn.A_log: entries from 2 on",
        "shape: model.layers.0.self_attn.dt_bias is [2], expected [16]",
    ):
        assert part in message, part


def test_too_short_decay_is_a_wrong_shape(tensors, tmp_path):
    folder = write_checkpoint(tmp_path, two_layers(), tensors | {A_LOG: np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"shape: .*A_log is \[1\], expected \[2\]"):
        k3jax.load_hf(folder)


def test_unreadable_files_are_named(tensors, tmp_path):
    cfg = two_layers()
    folder = write_checkpoint(tmp_path / "cut", cfg, tensors)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable"):
        k3jax.load_hf(folder)
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable"):
        k3jax.load_hf(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file"):
        k3jax.load_hf(folder)


def test_faults_of_the_index_are_named(tensors, tmp_path):
    folder = write_checkpoint(tmp_path, two_layers(), tensors, shards=2)
    index, (first, second) = folder / "model.safetensors.index.json", sorted(folder.glob("*of*"))
    right = json.loads(index.read_text())
    swapped = {
        n: second.name if n == "lm_head.weight" else f for n, f in right["weight_map"].items()
    }
    assert swapped != right["weight_map"]
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not in model-00002"):
        k3jax.load_hf(folder)
    held = load_file(first) | {"surplus.weight": np.zeros(3, np.float32)}
    save_file(held, first)
    index.write_text(json.dumps(right))
    with pytest.raises(CheckpointError, match=r"unknown: surplus\.weight"):
        k3jax.load_hf(folder)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"files that do not exist: .*model-00002"):
        k3jax.load_hf(folder)
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="not a safetensors index"):
            k3jax.load_hf(folder)


def test_tensor_stored_twice_is_refused(tensors, tmp_path):
    folder = write_checkpoint(tmp_path, two_layers(), tensors)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    norm = {"language_model.model.norm.weight": tensors["model.norm.weight"]}
    save_file(norm, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored twice"):
        k3jax.load_hf(folder)


def test_dtype_applies_to_all_but_the_float32_parameters(tensors, tmp_path):
    """A bias of 1.001 must not become 1.0."""
    bias = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    exact = np.linspace(1.001, 1.006, 6).astype(np.float32)
    folder = write_checkpoint(tmp_path / "a", two_layers(), tensors | {bias: exact})
    model = k3jax.load_hf(folder, dtype=jnp.bfloat16)
    kept = {"A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm", "router_bias"}
    for name, variable in named_variables(model).items():
        wide = name.rsplit(".", 1)[-1] in kept
        assert variable.dtype == (jnp.float32 if wide else jnp.bfloat16), name
    np.testing.assert_array_equal(
        model.language.stack.segments[0].layers[1].feed_forward.router_bias[...], exact
    )
    # Without a dtype, the stored types stay; whatever is stored, the float32 ones are float32.
    narrow = {name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}
    again = k3jax.load_hf(write_checkpoint(tmp_path / "b", two_layers(), narrow))
    types = {name: v.dtype for name, v in named_variables(model).items()}
    assert types == {name: v.dtype for name, v in named_variables(again).items()}


def test_config_of_another_model_reports_the_difference(tensors, tmp_path):
    folder = write_checkpoint(tmp_path, two_layers(), tensors)
    other = dataclasses.replace(two_layers(), dim=32)
    (folder / "config.json").write_text(json.dumps(other.to_hf()))
    with pytest.raises(CheckpointError, match=r"shape: model\.embed_tokens\.weight is \[40, 24\]"):
        k3jax.load_hf(folder)


def test_layers_of_one_variable_in_several_types_are_kept_with_a_warning(tmp_path):
    cfg = pattern_config("KMKMKM", block=2)
    tensors = random_tensors(cfg)
    names = [n for n in tensors if n.endswith("input_layernorm.weight")]
    name = names[-1]
    tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    folder = write_checkpoint(tmp_path / "a", cfg, tensors)
    with pytest.warns(UserWarning, match=r"types \(bfloat16, float32\); kept as float32"):
        k3jax.load_hf(folder)
    convert_hf(folder, tmp_path / "b")
    written = {
        n.removeprefix("language_model."): t for n, t in stored_bytes(tmp_path / "b").items()
    }
    assert written == stored_bytes(folder)


def test_files_and_types_of_other_names_are_refused(tmp_path):
    file = copy_checkpoint("text_small", tmp_path / "c") / "model.safetensors"
    with pytest.raises(CheckpointError, match="name the folder"):
        k3jax.load_hf(file)
    with pytest.raises(UserError, match="dtype='fp32' must be float32"):
        k3jax.load_hf(file.parent, dtype="fp32")
