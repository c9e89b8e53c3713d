"""Trace, and the numbers of block attention residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import k3jax
from k3jax.model import abstract_model
from k3jax.nn.cache import CallContext
from k3jax.nn.feed_forward import GatedMLP
from k3jax.nn.kda import KimiDeltaAttention
from k3jax.nn.mla import LatentAttention
from tests.small_configs import (
    five_layers,
    pattern_config,
    quick_jit,
    random_tokens,
    randomized,
    relative_error,
)

RELEASED_PATTERN = "KKKM" * 23 + "M"


@pytest.mark.parametrize(
    ("pattern", "block", "num_mixtures", "num_sources"),
    [(RELEASED_PATTERN, 12, 186, 9), ("KKMKM", 2, 10, 4)],
)
def test_number_of_mixtures(pattern, block, num_mixtures, num_sources):
    cfg = pattern_config(pattern, block=block)
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    found = jax.eval_shape(k3jax.trace, abstract_model(cfg), tokens)
    layers = len(pattern)
    assert {name: value.shape for name, value in found.items()} == {
        "logits": (2, 3, 40),
        "layer_outputs": (layers, 2, 3, 24),
        "expert_ids": (layers - 1, 2, 3, 2),
        "expert_weights": (layers - 1, 2, 3, 2),
        "attention_residual_weights": (num_mixtures, 2, 3, num_sources),
    }


@pytest.mark.parametrize(
    ("pattern", "block", "embedding", "sublayer", "expected"),
    [
        (RELEASED_PATTERN, 12, 9.0, 0.0, 1.0),
        ("KKMKM", 2, 12.0, 0.0, 3.0),
        ("KKMKM", 2, 12.0, 1.0, 5.5),
    ],
)
def test_value_before_the_final_norm(monkeypatch, pattern, block, embedding, sublayer, expected):
    """Uniform mixtures (pseudo-queries zero) of constant sublayers."""

    def attention(self, x, cache, context):
        return jnp.full_like(x, sublayer), cache

    monkeypatch.setattr(KimiDeltaAttention, "__call__", attention)
    monkeypatch.setattr(LatentAttention, "__call__", attention)
    monkeypatch.setattr(GatedMLP, "__call__", lambda self, x: jnp.full_like(x, sublayer))
    cfg = pattern_config(pattern, block=block, dense=len(pattern))
    zeros = jax.tree.map(
        lambda v: v.replace(jnp.zeros(v.shape)),
        abstract_model(cfg),
        is_leaf=lambda v: isinstance(v, nnx.Variable),
    )

    def before_norm(model, x):
        stream, _, _ = model.language.stack(x, None, CallContext())
        return model.language.output_mix(stream.bank, stream.prefix, stream.count)[0]

    got = quick_jit(before_norm)(zeros, jnp.full((1, 1, cfg.dim), embedding))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.fixture(scope="module")
def traced():
    model = randomized(five_layers())
    tokens = random_tokens(model.cfg, 1, 9)
    ids = np.array([[4, 4, 4, 4, 7, 7, 0, 0, 0]], np.int32)
    run = quick_jit(k3jax.trace)
    return model, tokens, ids, run, run(model, tokens, ids)


def test_packed_documents_trace_as_they_do_alone(traced):
    model, tokens, ids, run, packed = traced
    for number in (4, 7):
        columns = np.flatnonzero(ids[0] == number)
        alone = np.zeros((1, 9), np.int32)
        alone[0, : columns.size] = tokens[0, columns]
        found = run(model, alone, (np.arange(9) < columns.size).astype(np.int32)[None])
        for name, value in packed.items():
            axis = 1 if name == "logits" else 2
            got = np.take(np.asarray(value), columns, axis=axis)
            expected = np.take(np.asarray(found[name]), np.arange(columns.size), axis=axis)
            if name == "expert_ids":
                np.testing.assert_array_equal(got, expected)
            else:
                assert relative_error(got, expected) <= 1e-5, name


def test_traced_mixtures_are_distributions_over_the_sources_that_exist(traced):
    weights = np.asarray(traced[4]["attention_residual_weights"])[:, 0, :6]  # [X, T, N]
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    # Block 3: the feed-forward of layer 0 sees the embedding and the running sum; the bank grows
    # again at layer 3 (mixtures 5 and 6), after its attention mixture was formed.
    sources = [2, 2, 2, 2, 2, 2, 3, 3, 3, 3]
    for mixture, count in zip(weights, sources, strict=True):
        assert (mixture[:, :count] > 0).all()
        assert not mixture[:, count:].any()


def test_traced_experts_are_sorted_and_weighted(traced):
    found = traced[4]
    ids = np.asarray(found["expert_ids"])[:, 0, :6]
    assert (np.diff(ids, axis=-1) > 0).all()
    np.testing.assert_allclose(
        np.asarray(found["expert_weights"])[:, 0, :6].sum(-1), 1.5, rtol=1e-5
    )


def test_traced_logits_are_those_of_the_model(traced):
    model, tokens, ids, _, found = traced
    expected = quick_jit(lambda m, t, s: m(t, s))(model, tokens, ids)
    real = ids[0] != 0
    assert relative_error(found["logits"][0, real], expected[0, real]) <= 1e-6
