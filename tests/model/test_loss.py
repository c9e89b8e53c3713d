"""Next-token loss: which tokens are targets, and what the metrics say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.errors import UserError
from k3jax.media import Media
from k3jax.model import abstract_model
from tests.small_configs import pattern_config, quick_jit, random_tokens, randomized, two_layers
from tests.tolerances import assert_close

IDS = np.array([[0, 0, 3, 3, 3, 9, 9, 0], [1, 1, 1, 1, 2, 0, 2, 2]], np.int32)


@pytest.fixture(scope="module")
def model():
    return randomized(two_layers())


@pytest.fixture(scope="module")
def loss_of():
    gradient = jax.value_and_grad(k3jax.next_token_loss, has_aux=True)
    return quick_jit(gradient)


def test_targets_are_neighbours_of_one_segment(model, loss_of):
    tokens = random_tokens(model.cfg, 2, 8)
    (loss, metrics), _ = loss_of(model, tokens, IDS)
    logits = np.asarray(quick_jit(lambda m, t, s: m(t, s))(model, tokens, IDS), np.float64)
    expected = np.zeros((2, 7))
    for row, t in np.ndindex(2, 7):
        if IDS[row, t] and IDS[row, t] == IDS[row, t + 1]:
            scores = logits[row, t]
            expected[row, t] = np.log(np.exp(scores).sum()) - scores[tokens[row, t + 1]]
    assert np.count_nonzero(expected) == 7
    assert_close(metrics["token_losses"], expected)
    assert int(metrics["num_targets"]) == 7
    assert_close(loss, expected.sum() / 7)
    assert_close(metrics["loss"], loss)
    statistics = metrics["statistics"]
    assert int(statistics.num_tokens) == np.count_nonzero(IDS)
    assert int(statistics.expert_counts.sum()) == 2 * np.count_nonzero(IDS)
    assert int(statistics.histogram.sum()) == 6 * np.count_nonzero(IDS)
    for leaf in jax.tree.leaves(statistics):
        assert leaf.dtype == jnp.int32


def test_tokens_of_padding_move_nothing(model, loss_of):
    tokens = random_tokens(model.cfg, 2, 8)
    others = jnp.where(IDS != 0, tokens, random_tokens(model.cfg, 2, 8, seed=4))
    (expected, _), gradients = loss_of(model, tokens, IDS)
    (loss, _), found = loss_of(model, others, IDS)
    assert_close(loss, expected)
    jax.tree.map(lambda a, b: assert_close(a, b, gradient=True), found, gradients)


@pytest.mark.parametrize("ids", [np.zeros((2, 8)), np.tile([1, 2], (2, 4))], ids=["pad", "single"])
def test_without_targets_loss_and_gradients_are_zero(model, loss_of, ids):
    tokens = random_tokens(model.cfg, 2, 8)
    (loss, metrics), gradients = loss_of(model, tokens, ids.astype(np.int32))
    assert float(loss) == 0
    assert int(metrics["num_targets"]) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_one_token_has_no_target(model):
    loss, metrics = quick_jit(k3jax.next_token_loss)(model, jnp.zeros((2, 1), jnp.int32))
    assert float(loss) == 0
    assert int(metrics["num_targets"]) == 0


@pytest.mark.parametrize(("place", "wrong"), [((0, 3), 40), ((1, 7), -3)])
def test_wrong_id_makes_the_loss_nan(model, loss_of, place, wrong):
    tokens = random_tokens(model.cfg, 2, 8).at[place].set(wrong)
    (loss, _), _ = loss_of(model, tokens, IDS)
    assert np.isnan(loss)


def test_gradients_are_found_without_all_logits_in_memory():
    cfg = pattern_config("K", block=1, vocab_size=1 << 16)
    model = abstract_model(cfg)
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    gradient = jax.jit(jax.value_and_grad(k3jax.next_token_loss, has_aux=True))
    memory = gradient.lower(model, tokens).compile().memory_analysis()
    logits = 2 * 128 * cfg.vocab_size * 4
    assert memory.temp_size_in_bytes < logits, (memory.temp_size_in_bytes, logits)


def test_model_without_experts_has_no_statistics():
    model = randomized(pattern_config("K", block=1))
    _, metrics = quick_jit(k3jax.next_token_loss)(model, random_tokens(model.cfg, 1, 4))
    assert metrics["statistics"] is None


def test_chosen_targets():
    model = k3jax.init(pattern_config("KM", block=1), jax.random.key(0))
    tokens = np.arange(8, dtype=np.int32)[None]
    targets = np.array([[0, 0, 0, 1, 0, 1, 1, 0]], bool)
    loss, metrics = k3jax.next_token_loss(model, tokens, targets=targets)
    every = k3jax.next_token_loss(model, tokens)[1]["token_losses"]
    assert int(metrics["num_targets"]) == 3
    np.testing.assert_allclose(loss, np.asarray(every)[0, [2, 4, 5]].mean(), rtol=1e-6)
    with pytest.raises(UserError, match=r"targets .* must have the shape of tokens"):
        k3jax.next_token_loss(model, tokens, targets=targets[:, 1:])
    with pytest.raises(UserError, match="pass it as media="):
        k3jax.next_token_loss(model, tokens, Media(patches=None, grids=None, sizes=None))
