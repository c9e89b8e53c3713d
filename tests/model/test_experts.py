"""Whole models with packed experts: conversion, values, caches, gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import k3jax
from k3jax.errors import UserError
from k3jax.model import abstract_model, next_token_loss, pack_experts, unpack_experts
from k3jax.nn.packed import PackedWeight
from k3jax.nn.parameters import named_variables
from tests.small_configs import pattern_config, quick_jit, random_tokens, randomized
from tests.tolerances import assert_close


def config(pattern: str, **changes):
    cfg = pattern_config(pattern, block=2, moe_latent_dim=32, **changes)
    return dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, expert_hidden_dim=32))


CFG = config("MMMM")  # a dense layer and experts in a scan


@pytest.fixture(scope="module")
def packed():
    return jax.jit(pack_experts)(randomized(CFG))


def test_conversion_keeps_structure_names_and_values(packed):
    names = named_variables(packed)
    scanned = [v for name, v in names.items() if name.endswith("expert_gate.codes") and v.ndim == 4]
    assert scanned and scanned[0].shape[0] == 3
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
    expected = quick_jit(lambda m, t: m(t))(decoded, tokens)

    @quick_jit
    def run(model, tokens):
        start, caches = k3jax.prefill(model, tokens[:, :6], max_length=8)
        return start, k3jax.decode_step(model, tokens[:, 6], caches)[0]

    start, last = run(packed, tokens)
    assert_close(start, expected[:, :6])
    assert_close(last, expected[:, 6], gradient=True)  # another form of attention


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_pass_packed_experts_by(packed, remat):
    tokens = random_tokens(CFG, 2, 7)

    def gradients(model):
        structure, params, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda params: next_token_loss(  # noqa: E731
            nnx.merge(structure, params, rest), tokens, remat=remat
        )[0]
        grads = quick_jit(jax.grad(loss))(params)
        return {path: leaf[...] for path, leaf in nnx.to_flat_state(grads)}

    found = gradients(packed)
    expected = gradients(unpack_experts(packed, dtype=jnp.float32))
    assert not any("codes" in path for path in found) and found.keys() < expected.keys()
    for path, gradient in found.items():
        assert_close(gradient, expected[path], gradient=True, name=str(path))


def test_conversion_refuses_bad_input():
    model = abstract_model(CFG)
    with pytest.raises(UserError, match="rule='nearest' must be one of floor, even, ceil"):
        pack_experts(model, rule="nearest")
    with pytest.raises(UserError, match="dtype=float16 cannot hold every MXFP4 weight"):
        unpack_experts(model, dtype=jnp.float16)
    odd = dataclasses.replace(CFG, moe=dataclasses.replace(CFG.moe, expert_hidden_dim=24))
    with pytest.raises(UserError, match=r"expert_down .* an input width of 24, which is no"):
        pack_experts(abstract_model(odd))
