"""Checkpoints of the released code: packed experts compute as released, and come back unchanged."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import k3jax
from k3jax.checkpoint.convert import convert_hf
from k3jax.nn.packed import PackedMatrix, PackedWeight
from tests.golden_cases import assert_golden, golden_case
from tests.released_files import copy_checkpoint, stored_bytes
from tests.small_configs import quick_jit

CASES = ("text_small", "vision_small", "kimi_linear", "kimi_linear_groups", "mxfp4")


@pytest.mark.parametrize("experts", ["auto", "dequantized"])
def test_packed_checkpoint_gives_the_released_logits(experts):
    case = golden_case("mxfp4")
    model = k3jax.load_hf(case.checkpoint, dtype=jnp.float32, experts=experts)
    moe = model.language.stack.segments[0].layers[1].feed_forward
    assert isinstance(moe.expert_gate, nnx.Param if experts == "dequantized" else PackedMatrix)
    run = quick_jit(lambda model, tokens: model.forward(tokens)[0])
    logits = run(model, jnp.asarray(case.arrays["input_ids"]))
    assert_golden(logits, case.arrays["logits"], case.tolerance, "logits")


def test_dequantized_experts_equal_the_released_numbers_exactly():
    case = golden_case("mxfp4")
    model = k3jax.load_hf(case.checkpoint, experts="dequantized")
    moe = model.language.stack.segments[0].layers[case.facts["dequant_layer"]].feed_forward
    stem = f"dequant.layers.{case.facts['dequant_layer']}.block_sparse_moe.experts"
    for letter, matrix in {"w1": "gate", "w3": "up", "w2": "down"}.items():
        weights = getattr(moe, f"expert_{matrix}")
        assert weights.dtype == jnp.bfloat16
        for expert in range(model.cfg.moe.num_experts):
            expected = case.arrays[f"{stem}.{expert}.{letter}.weight"]
            np.testing.assert_array_equal(np.asarray(weights[expert]).T, expected)


def test_packed_experts_are_neither_trained_nor_cast():
    model = k3jax.load_hf(golden_case("mxfp4").checkpoint, dtype=jnp.float32)
    packed = jax.tree.leaves(nnx.state(model, PackedWeight))
    assert packed and {leaf.dtype for leaf in packed} == {jnp.dtype(jnp.uint8)}
    trained = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {leaf.dtype for leaf in trained} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("case", CASES)
def test_load_and_save_gives_back_every_tensor_byte_for_byte(case, tmp_path):
    source = copy_checkpoint(case, tmp_path / "source")
    k3jax.save_hf(k3jax.load_hf(source), tmp_path / "saved", shard_bytes=100_000)
    expected = stored_bytes(source)
    assert stored_bytes(tmp_path / "saved") == expected
    convert_hf(source, tmp_path / "converted")
    assert stored_bytes(tmp_path / "converted") == expected
    for folder in ("saved", "converted"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config == json.loads((source / "config.json").read_text())


def test_numbers_survive_packing_and_unpacking(tmp_path):
    """Quantising is idempotent in values: what was MXFP4 once is MXFP4 exactly."""
    source = copy_checkpoint("mxfp4", tmp_path / "source")
    convert_hf(source, tmp_path / "numbers", experts="dequantized")
    convert_hf(tmp_path / "numbers", tmp_path / "packed", experts="packed")
    convert_hf(tmp_path / "packed", tmp_path / "again", experts="dequantized")
    numbers = stored_bytes(tmp_path / "numbers")
    assert {dtype for dtype, _, _ in numbers.values()} == {"BF16", "F32"}
    assert stored_bytes(tmp_path / "again") == numbers
    config = json.loads((tmp_path / "numbers" / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"
    # The same from a model in memory, and for an experts choice at loading.
    model = k3jax.load_hf(tmp_path / "numbers", experts="packed")
    k3jax.save_hf(model, tmp_path / "model")
    assert stored_bytes(tmp_path / "model") == stored_bytes(tmp_path / "packed")
    k3jax.save_hf(model, tmp_path / "unpacked", experts="dequantized")
    assert stored_bytes(tmp_path / "unpacked") == stored_bytes(tmp_path / "again")
