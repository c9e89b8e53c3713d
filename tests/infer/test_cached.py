"""Prefill in pieces, one whole pass and decoding token by token give the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.config import K3Config
from k3jax.model import empty_caches
from tests.golden_cases import assert_golden, golden_case
from tests.small_configs import (
    five_layers,
    previous_family,
    quick_jit,
    random_tokens,
    randomized,
    relative_error,
)

# What the project promises for paths that compute the same thing on a fresh tiny().
BOUND = 1e-5
LENGTH = 9


class Paths:
    """The three ways through one model, each compiled once per number of tokens."""

    def __init__(self, model, capacity: int):
        self.model, self.capacity = model, capacity
        self._whole = quick_jit(lambda m, t, s: m(t, s))
        self._piece = quick_jit(lambda m, t, s, c: k3jax.prefill(m, t, s, caches=c))
        self._step = quick_jit(k3jax.decode_step)

    def whole(self, tokens, segment_ids=None):
        return self._whole(self.model, tokens, segment_ids)

    def step(self, token, caches):
        return self._step(self.model, token, caches)

    def pieces(self, lengths, tokens, segment_ids):
        """Logits of prefill in pieces of these lengths, and the caches."""
        caches = empty_caches(self.model.cfg, len(tokens), self.capacity, jnp.float32)
        logits, begin = [], 0
        for length in lengths:
            now = slice(begin, begin + length)
            found, caches = self._piece(self.model, tokens[:, now], segment_ids[:, now], caches)
            logits.append(found)
            begin += length
        return jnp.concatenate(logits, axis=1), caches

    def then_steps(self, num_pieces, lengths, tokens, segment_ids):
        """Logits of `pieces` over the first tokens, and of decoding the others one by one."""
        logits, caches = self.pieces(lengths, tokens[:, :num_pieces], segment_ids)
        steps = []
        for t in range(num_pieces, tokens.shape[1]):
            step, caches = self.step(tokens[:, t], caches)
            steps.append(step)
        return jnp.concatenate([logits, jnp.stack(steps, axis=1)], axis=1)


@pytest.fixture(scope="module")
def paths():
    return Paths(randomized(five_layers()), 16)


def real_error(actual, expected, segment_ids) -> float:
    real = np.asarray(segment_ids) != 0
    return relative_error(np.asarray(actual)[real], np.asarray(expected)[real])


# Row 0 is padded left, row 1 right, row 2 has a hole, row 3 is all real.
RAGGED = np.ones((4, LENGTH), np.int32)
RAGGED[0, :4] = 0
RAGGED[1, 6:] = 0
RAGGED[2, 2:5] = 0


@pytest.mark.parametrize(
    "lengths", [(1,) * 9, (5, 3, 1), (1, 3, 5), (3, 5, 1), (3, 1, 5), (1, 1, 5, 1, 1), (3, 3, 3)]
)
def test_pieces_of_any_length_equal_one_pass(paths, lengths):
    tokens = random_tokens(paths.model.cfg, 4, LENGTH)
    expected = paths.whole(tokens, RAGGED)
    logits, caches = paths.pieces(lengths, tokens, RAGGED)
    assert real_error(logits, expected, RAGGED) <= BOUND
    np.testing.assert_array_equal(np.asarray(caches.valid)[:, :LENGTH], RAGGED != 0)
    assert not caches.valid[:, LENGTH:].any()
    assert int(caches.length) == LENGTH


def test_rows_of_any_layout_equal_the_row_alone(paths):
    tokens = random_tokens(paths.model.cfg, 4, LENGTH)
    logits = paths.whole(tokens, RAGGED)
    for row, ids in enumerate(RAGGED):
        alone = tokens[row : row + 1, ids != 0]
        padded = jnp.pad(alone, ((0, 0), (0, LENGTH - alone.shape[1])))
        expected = paths.whole(jnp.tile(padded, (4, 1)), np.tile(np.sort(ids)[::-1], (4, 1)))
        got = np.asarray(logits[row])[ids != 0]
        assert relative_error(got, np.asarray(expected[0])[: len(got)]) <= BOUND, row


def test_padding_holds_any_token(paths):
    tokens = random_tokens(paths.model.cfg, 4, LENGTH)
    others = random_tokens(paths.model.cfg, 4, LENGTH, seed=5)
    changed = jnp.where(RAGGED != 0, tokens, others)
    expected = paths.whole(tokens, RAGGED)
    assert real_error(paths.whole(changed, RAGGED), expected, RAGGED) == 0


def test_decoding_after_a_ragged_prefill_equals_one_pass(paths):
    tokens = random_tokens(paths.model.cfg, 4, LENGTH)
    ids = np.ones((4, LENGTH), np.int32)
    ids[:, :5] = RAGGED[:, 2:7]  # padding on the left, on the right, and in between
    expected = paths.whole(tokens, ids)
    logits = paths.then_steps(5, (5,), tokens, ids)
    assert real_error(logits, expected, ids) <= BOUND


def test_last_only_takes_the_last_real_token_of_each_row(paths):
    tokens = random_tokens(paths.model.cfg, 4, LENGTH)
    expected = paths.whole(tokens, RAGGED)
    prefill = quick_jit(k3jax.prefill, static_argnames=("last_only",))
    logits, _ = prefill(paths.model, tokens, RAGGED, last_only=True)
    last = LENGTH - 1 - np.argmax(RAGGED[:, ::-1], axis=1)
    assert last.tolist() == [8, 5, 8, 8]
    assert relative_error(logits, expected[np.arange(4), last]) <= BOUND
    logits, caches = prefill(paths.model, tokens, last_only=True)
    assert relative_error(logits[3], expected[3, -1]) <= BOUND
    assert caches.capacity == LENGTH + 256


def test_packed_documents_equal_documents_alone(paths):
    lengths = (2, 4, 1, 2)
    cfg = paths.model.cfg
    documents = [random_tokens(cfg, 1, n, seed=n) for n in lengths]
    tokens = jnp.concatenate(documents, axis=1)
    ids = np.repeat([3, 7, 3, 7], lengths)[None]  # an id may come back
    packed = paths.whole(jnp.tile(tokens, (4, 1)), np.tile(ids, (4, 1)))[0]
    alone = np.zeros((4, LENGTH), np.int32)
    rows = np.zeros((4, LENGTH), np.int32)
    for row, document in enumerate(documents):
        alone[row, : lengths[row]], rows[row, : lengths[row]] = document[0], 1
    logits = paths.whole(jnp.asarray(alone), rows)
    expected = np.concatenate([logits[row, :n] for row, n in enumerate(lengths)])
    assert relative_error(packed, expected) <= BOUND


def test_previous_family_decodes_as_it_prefills():
    paths = Paths(randomized(previous_family()), 12)
    tokens, ids = random_tokens(paths.model.cfg, 2, 8), np.ones((2, 8), np.int32)
    ids[0, :3] = 0
    expected = paths.whole(tokens, ids)
    assert real_error(paths.then_steps(5, (5,), tokens, ids), expected, ids) <= BOUND


def test_fresh_tiny_model_agrees_on_every_path():
    paths = Paths(k3jax.init(K3Config.tiny(), jax.random.key(3)), 24)
    tokens = random_tokens(paths.model.cfg, 2, 24)
    ids = jnp.ones_like(tokens)
    expected = paths.whole(tokens)
    for lengths in ((23, 1), (1, 23), (1,) * 24):
        logits, _ = paths.pieces(lengths, tokens, ids)
        assert relative_error(logits, expected) <= BOUND, lengths
    assert relative_error(paths.then_steps(1, (1,), tokens, ids), expected) <= BOUND


@pytest.mark.parametrize(
    "name", ["text_small", pytest.param("kimi_linear", marks=pytest.mark.slow)]
)
def test_pieces_and_decoding_meet_the_golden_tolerance(name):
    case = golden_case(name)
    paths = Paths(k3jax.load_hf(case.checkpoint, dtype=jnp.float32), 64)
    tokens = jnp.asarray(case.arrays["input_ids"])
    prompt = tokens.shape[1] - 6
    logits = paths.then_steps(prompt, (1, prompt - 2, 1), tokens, jnp.ones_like(tokens))
    assert_golden(logits, case.arrays["logits"], case.tolerance, "logits")
