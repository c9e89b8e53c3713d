"""Sampling: greedy text, stop ids, nucleus, keys and batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.errors import UserError
from k3jax.infer.generate import sample
from tests.small_configs import quick_jit, random_tokens, randomized, two_layers

NEW = 6


@pytest.fixture(scope="module")
def model():
    return randomized(two_layers())


@pytest.fixture(scope="module")
def prompts(model):
    """Rows of 2, 5 and 4 real tokens, padded left."""
    tokens = random_tokens(model.cfg, 3, 5)
    ids = np.ones((3, 5), np.int32)
    ids[0, :3] = ids[2, :1] = 0
    return tokens, ids


@pytest.fixture(scope="module")
def greedy(model, prompts):
    tokens, ids = prompts
    return np.asarray(
        k3jax.generate(model, tokens, segment_ids=ids, max_new_tokens=NEW, temperature=0)
    )


def test_greedy_text_is_the_repeated_argmax_of_full_passes(model, prompts, greedy):
    tokens, ids = np.asarray(prompts[0]), prompts[1]
    forward = quick_jit(lambda m, t, s: m(t, s))
    for row in range(3):
        text = np.zeros((1, 5 + NEW), np.int32)
        prompt = tokens[row, ids[row] != 0]
        text[0, : len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + NEW):
            real = (np.arange(5 + NEW) < end).astype(np.int32)[None]
            text[0, end] = np.argmax(forward(model, text, real)[0, end - 1])
        np.testing.assert_array_equal(greedy[row], text[0, len(prompt) : len(prompt) + NEW])


def test_rows_end_after_a_stop_id_and_are_padded(model, prompts, greedy):
    tokens, ids = prompts
    stop = [int(greedy[0, 2]), int(greedy[1, 0])]
    got = k3jax.generate(
        model, tokens, segment_ids=ids, max_new_tokens=NEW, temperature=0, stop_ids=stop
    )
    expected = greedy.copy()
    for row in expected:
        ends = np.flatnonzero(np.isin(row, stop))
        if ends.size:
            row[ends[0] + 1 :] = 39  # the configuration's pad id
    assert (expected != greedy).any()
    np.testing.assert_array_equal(got, expected)


def test_same_key_gives_the_same_text(model, prompts):
    tokens, ids = prompts

    def run(key, **options):
        return np.asarray(
            k3jax.generate(model, tokens, segment_ids=ids, max_new_tokens=NEW, key=key, **options)
        )

    first = run(jax.random.key(5))
    np.testing.assert_array_equal(first, run(jax.random.key(5)))
    np.testing.assert_array_equal(run(None), run(jax.random.key(0)))
    assert (first != run(jax.random.key(6))).any()
    assert ((first >= 0) & (first < 40)).all()
    # The smallest nucleus holds one token: greedy, at any temperature.
    np.testing.assert_array_equal(
        run(jax.random.key(5), top_p=1e-6, temperature=3.0),
        run(jax.random.key(7), temperature=0.0),
    )


def test_samples_follow_temperature_and_nucleus():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
    rows = jnp.tile(logits, (4000, 1))

    def shares(temperature, top_p):
        ids = sample(rows, jax.random.key(1), temperature, top_p)
        return np.bincount(ids, minlength=4) / len(ids)

    np.testing.assert_allclose(shares(1.0, 1.0), [0.5, 0.25, 0.15, 0.1], atol=0.03)
    np.testing.assert_allclose(shares(1.0, 0.7), [2 / 3, 1 / 3, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(1.0, 0.76), np.array([50, 25, 15, 0]) / 90, atol=0.03)
    sharp = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    np.testing.assert_allclose(shares(0.5, 1.0), sharp / sharp.sum(), atol=0.03)
    assert shares(0.0, 1.0)[0] == 1
    assert shares(1e-9, 1.0)[0] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0.0 must lie in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"stop_ids": (40,)}, "token id 40"),
        ({"tokens": np.zeros((2, 0), np.int32)}, "at least one"),
        ({"tokens": np.full((1, 2), 77)}, "token id 77"),
        ({"segment_ids": np.array([[0, 1], [0, 0]])}, r"rows \[1\] of the prompts hold padding"),
        ({"segment_ids": np.array([[1, 2], [1, 1]])}, "row 0 holds segments"),
    ],
)
def test_wrong_arguments_are_refused(model, options, message):
    arguments = {"tokens": np.zeros((2, 2), np.int32), "max_new_tokens": 1} | options
    with pytest.raises(UserError, match=message):
        k3jax.generate(model, **arguments)
