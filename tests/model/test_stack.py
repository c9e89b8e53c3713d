"""Scanned or written out, with any amount of recomputation: one model, one gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.config import K3Config
from k3jax.model import abstract_model
from tests.small_configs import (
    five_layers,
    pattern_config,
    quick_jit,
    random_tokens,
    randomized,
    relative_error,
)
from tests.tolerances import assert_close

SEGMENTS = np.array([[0, 1, 1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 0, 0]], np.int32)


def value_and_gradients(model, tokens, **options):
    """A number that every logit and every real token moves, its gradients, and the statistics."""
    weights = np.random.default_rng(1).standard_normal((*tokens.shape, model.cfg.vocab_size))
    weights = jnp.asarray(weights * (SEGMENTS != 0)[..., None], jnp.float32)

    def objective(model, tokens):
        logits, _, statistics = model.forward(tokens, SEGMENTS, statistics=True, **options)
        return (logits * weights).mean(), statistics

    program = quick_jit(jax.value_and_grad(objective, has_aux=True))
    (value, statistics), gradients = program(model, tokens)
    return value, statistics, gradients


def assert_same_statistics(found, expected):
    """Equal counts; in histograms a score on the border of two bins may fall to either side.

    Two programs round a score differently in its last bit. Then the number of scores below one
    border differs by one; all other borders, and the total, agree.
    """
    found, expected = np.asarray(found), np.asarray(expected)
    if expected.ndim and expected.shape[-1] > 100:
        below, wanted = np.cumsum(found, -1), np.cumsum(expected, -1)
        np.testing.assert_array_equal(below[..., -1], wanted[..., -1])
        assert np.abs(below - wanted).max() <= 1 and np.count_nonzero(below != wanted) <= 2
    else:
        np.testing.assert_array_equal(found, expected)


def assert_same(found, expected):
    assert_close(found[0], expected[0], name="value")
    jax.tree.map(assert_same_statistics, found[1], expected[1])
    paths = jax.tree_util.tree_leaves_with_path(expected[2])
    for (path, wanted), got in zip(paths, jax.tree.leaves(found[2]), strict=True):
        assert_close(got, wanted, gradient=True, name=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def five():
    model = randomized(five_layers())
    tokens = random_tokens(model.cfg, *SEGMENTS.shape)
    return model, tokens, value_and_gradients(model, tokens)


def test_every_parameter_gets_a_gradient(five):
    for path, gradient in jax.tree_util.tree_leaves_with_path(five[2][2]):
        name = jax.tree_util.keystr(path)
        if "router_bias" in name:
            assert not np.any(gradient), name
        elif ".layers[0].attention_mix" in name and ".segments[0]" in name:
            # Layer 0 has one source only, so its mixture weighs nothing.
            assert not np.any(gradient), name
        else:
            assert np.any(gradient), name


@pytest.mark.parametrize(
    "options", [{"scan": False}, pytest.param({"remat": "dots"}, marks=pytest.mark.slow)], ids=str
)
def test_scan_and_remat_change_nothing(five, options):
    model, tokens, expected = five
    assert_same(value_and_gradients(model, tokens, **options), expected)


@pytest.mark.parametrize(
    ("pattern", "block", "dense"),
    [
        pytest.param("KKKM" * 3 + "M", 5, 13, marks=pytest.mark.slow),
        ("KKM" * 3, 2, 0),
    ],
)
def test_write_once_scan_equals_the_plain_scan(pattern, block, dense):
    """Blocks begin at different places of the repeating unit, some inside of it."""
    cfg = pattern_config(pattern, block=block, dense=dense)
    model = randomized(cfg)
    tokens = random_tokens(cfg, *SEGMENTS.shape)
    plain = value_and_gradients(model, tokens)
    assert_same(value_and_gradients(model, tokens, remat="full"), plain)


def test_scanned_tiny_model_equals_the_written_out_one():
    model = k3jax.init(K3Config.tiny(), jax.random.key(1))
    tokens = random_tokens(model.cfg, 2, 16)
    run = quick_jit(lambda m, t, scan: m.forward(t, scan=scan)[0], static_argnames="scan")
    assert relative_error(run(model, tokens, scan=False), run(model, tokens, scan=True)) <= 1e-5


def test_unknown_remat_is_refused():
    with pytest.raises(ValueError, match="remat='some' must be one of"):
        jax.eval_shape(
            functools.partial(k3jax.next_token_loss, remat="some"),
            abstract_model(five_layers()),
            jax.ShapeDtypeStruct((1, 4), jnp.int32),
        )


def test_full_remat_keeps_the_bank_once():
    """With a bank of 8 entries, twelve more steps cost twelve running sums, not twelve banks."""
    tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32)

    def temporaries(repeats, block):
        cfg = pattern_config("KM" * repeats, block=block, dense=2 * repeats)
        assert cfg.num_blocks == 8
        gradient = jax.grad(lambda m, t: k3jax.next_token_loss(m, t, remat="full")[0])
        compiled = quick_jit(gradient).lower(abstract_model(cfg), tokens).compile()
        parameters = sum(4 * leaf.size for leaf in jax.tree.leaves(abstract_model(cfg)))
        return compiled.memory_analysis().temp_size_in_bytes, parameters, cfg.dim

    few, parameters, _ = temporaries(4, 1)
    many, more_parameters, dim = temporaries(16, 4)
    stream = 512 * dim * 4  # bytes of one running sum; banks per step would be 12 * 8 of them
    assert many - few <= 12 * 2 * stream + (more_parameters - parameters)
