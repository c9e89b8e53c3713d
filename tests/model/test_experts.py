"""Whole models with packed experts: conversion, the released numbers, caches, training state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import k3jax
from k3jax.errors import UserError
from k3jax.model import abstract_model, pack_experts, unpack_experts
from k3jax.nn.packed import PackedWeight
from k3jax.nn.parameters import named_variables
from tests.golden_cases import assert_golden, golden_case
from tests.small_configs import pattern_config, quick_jit, random_tokens, randomized
from tests.tolerances import assert_close

# Two written-out layers and a scanned pair, so that both forms of stacking hold experts.
CFG = pattern_config("KKMKM", block=2, moe_latent_dim=32)
CFG = dataclasses.replace(CFG, moe=dataclasses.replace(CFG.moe, expert_hidden_dim=32))


@pytest.fixture(scope="module")
def packed():
    return jax.jit(pack_experts)(randomized(CFG))


def test_conversion_keeps_structure_names_and_values(packed):
    names = named_variables(packed)
    scanned = [v for name, v in names.items() if name.endswith("expert_gate.codes") and v.ndim == 4]
    assert scanned and scanned[0].shape[0] > 1
    trained = jax.jit(lambda m: unpack_experts(m, dtype=jnp.float32))(packed)
    original = abstract_model(CFG)
    assert jax.tree.structure(trained) == jax.tree.structure(original)
    again = jax.jit(pack_experts)(trained)
    assert jax.tree.structure(again) == jax.tree.structure(packed)
    jax.tree.map(np.testing.assert_array_equal, again, packed)
    # Converting what is converted already, and abstract models.
    assert jax.tree.structure(pack_experts(packed)) == jax.tree.structure(packed)
    assert jax.tree.structure(unpack_experts(original)) == jax.tree.structure(original)
    for abstract in (pack_experts(original), jax.eval_shape(pack_experts, trained)):
        assert jax.tree.structure(abstract) == jax.tree.structure(packed)
    assert named_variables(original).keys() - named_variables(packed).keys()  # not changed


def test_packed_bytes_are_a_quarter_of_bfloat16(packed):
    size = lambda model, kind: sum(  # noqa: E731
        v.size * v.dtype.itemsize for v in named_variables(model).values() if isinstance(v, kind)
    )
    experts = size(abstract_model(CFG), nnx.Param) - size(packed, nnx.Param)
    assert size(packed, PackedWeight) / (experts / 2) == 17 / 64


def test_model_prefill_and_decoding_equal_those_of_decoded_experts(packed):
    decoded = unpack_experts(packed, dtype=jnp.float32)
    tokens = random_tokens(CFG, 2, 7)
    expected = decoded(tokens)
    assert_close(packed(tokens), expected)
    logits, caches = k3jax.prefill(packed, tokens[:, :5], max_length=8)
    assert_close(logits, expected[:, :5])
    for column in (5, 6):
        logits, caches = k3jax.decode_step(packed, tokens[:, column], caches)
        assert_close(logits, expected[:, column], gradient=True)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_pass_packed_experts_by(packed, remat):
    tokens = random_tokens(CFG, 2, 7)

    def gradients(model):
        structure, params, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda params: k3jax.model.next_token_loss(  # noqa: E731
            nnx.merge(structure, params, rest), tokens, remat=remat
        )[0]
        grads = quick_jit(jax.grad(loss))(params)
        return {path: leaf[...] for path, leaf in nnx.to_flat_state(grads)}

    found = gradients(packed)
    expected = gradients(unpack_experts(packed, dtype=jnp.float32))
    assert not any("codes" in path for path in found) and found.keys() < expected.keys()
    for path, gradient in found.items():
        assert_close(gradient, expected[path], gradient=True, name=str(path))


def test_golden_case_with_packed_experts():
    case = golden_case("mxfp4")
    model = k3jax.load_hf(case.checkpoint, dtype=jnp.float32, experts="packed")
    assert any(isinstance(v, PackedWeight) for v in named_variables(model).values())
    logits = model(jnp.asarray(case.arrays["input_ids"]))
    assert_golden(logits, case.arrays["logits"], case.tolerance, "logits")


def test_conversion_refuses_bad_input():
    model = abstract_model(CFG)
    with pytest.raises(UserError, match="rule='nearest' must be one of floor, even, ceil"):
        pack_experts(model, rule="nearest")
    with pytest.raises(UserError, match="dtype=float16 cannot hold every MXFP4 weight"):
        unpack_experts(model, dtype=jnp.float16)
    odd = dataclasses.replace(CFG, moe=dataclasses.replace(CFG.moe, expert_hidden_dim=24))
    with pytest.raises(UserError, match=r"expert_down .* an input width of 24, which is no"):
        pack_experts(abstract_model(odd))
