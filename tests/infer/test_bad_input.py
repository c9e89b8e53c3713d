"""Wrong calls of prefill and decode_step: refused where values are known, NaN under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import k3jax
from k3jax.errors import UserError
from k3jax.infer import cached
from tests.small_configs import quick_jit, random_tokens, randomized, two_layers

CAPACITY = 6


@pytest.fixture(scope="module")
def model():
    return randomized(two_layers())


@pytest.fixture(scope="module")
def tokens(model):
    return random_tokens(model.cfg, 2, 4)


@pytest.fixture(scope="module")
def caches(model, tokens):
    return k3jax.prefill(model, tokens, max_length=CAPACITY)[1]


@pytest.mark.parametrize("bad", [-1, 40, 2**32 + 3])
def test_ids_outside_the_vocabulary_are_refused(model, tokens, caches, bad):
    wrong = np.asarray(tokens, np.int64)
    wrong[1, 2] = bad
    with pytest.raises(UserError, match=f"token id {bad} lies outside 0..39"):
        k3jax.prefill(model, wrong)
    with pytest.raises(UserError, match=f"token id {bad} lies outside 0..39"):
        k3jax.decode_step(model, wrong[:, 2], caches)


def test_ids_known_while_tracing_are_refused(model, tokens):
    wrong = tokens.at[0, 0].set(40)
    with pytest.raises(UserError, match="token id 40"):
        jax.eval_shape(lambda m: k3jax.prefill(m, wrong), model)


def test_row_with_two_segments_is_refused(model, tokens):
    with pytest.raises(UserError, match=r"row 1 holds segments \[1, 2\]"):
        k3jax.prefill(model, tokens, np.array([[0, 1, 1, 1], [1, 1, 2, 2]]))


def test_more_tokens_than_the_cache_holds_are_refused(model, tokens, caches):
    with pytest.raises(UserError, match="4 tokens do not fit max_length=3"):
        k3jax.prefill(model, tokens, max_length=3)
    with pytest.raises(UserError, match="4 more tokens after 4 do not fit the cache of 6"):
        k3jax.prefill(model, tokens, caches=caches)
    for _ in range(2):
        _, caches = k3jax.decode_step(model, tokens[:, 0], caches)
    with pytest.raises(UserError, match="1 more tokens after 6 do not fit the cache of 6"):
        k3jax.decode_step(model, tokens[:, 0], caches)


def test_shapes_that_do_not_agree_are_refused(model, tokens, caches):
    with pytest.raises(UserError, match=r"shape of tokens, \(2, 4\)"):
        k3jax.prefill(model, tokens, np.ones((2, 3), np.int32))
    with pytest.raises(UserError, match=r"integers \[B, T\].* \(4,\)"):
        k3jax.prefill(model, tokens[0])
    with pytest.raises(UserError, match=r"float32 \(2, 4\)"):
        k3jax.prefill(model, tokens.astype(jnp.float32))
    with pytest.raises(UserError, match=r"at least one.*\(2, 0\)"):
        k3jax.prefill(model, tokens[:, :0])
    with pytest.raises(UserError, match=r"integers \[B\].* \(2, 1\)"):
        k3jax.decode_step(model, tokens[:, :1], caches)
    with pytest.raises(UserError, match="3 rows do not match the cache of 2"):
        k3jax.decode_step(model, jnp.zeros((3,), jnp.int32), caches)
    with pytest.raises(UserError, match="max_length=9 differs from the capacity 6"):
        k3jax.prefill(model, tokens[:, :1], caches=caches, max_length=9)


@pytest.fixture(scope="module")
def prefill_jit():
    return quick_jit(lambda m, t, s, c: k3jax.prefill(m, t, s, caches=c))


@pytest.fixture(scope="module")
def decode_jit():
    return quick_jit(k3jax.decode_step)


@pytest.mark.parametrize("bad", [-1, 40, 2**30])
def test_id_outside_the_vocabulary_gives_nan_under_jit(model, tokens, caches, decode_jit, bad):
    forward = quick_jit(lambda m, t: m(t))
    right = forward(model, tokens)
    logits = forward(model, tokens.at[1, 1].set(bad))
    assert np.isnan(logits[1, 1:]).all()
    np.testing.assert_array_equal(logits[0], right[0])
    logits, after = decode_jit(model, tokens[:, 0].at[0].set(bad), caches)
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
    logits, _ = decode_jit(model, tokens[:, 0], after)
    assert np.isnan(logits[0]).all(), "a wrong id must not be forgotten"


def assert_unchanged(after, before):
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_write_past_the_cache_changes_nothing_and_gives_nan_under_jit(
    model, tokens, caches, prefill_jit, decode_jit
):
    ids = jnp.ones_like(tokens).at[0, 0].set(0)
    logits, after = prefill_jit(model, tokens, ids, caches)  # 4 used, 2 free
    assert np.isnan(logits).all()
    assert_unchanged(after, caches)
    for _ in range(2):
        logits, caches = decode_jit(model, tokens[:, 0], caches)
        assert np.isfinite(logits).all()
    logits, after = decode_jit(model, tokens[:, 0], caches)
    assert np.isnan(logits).all()
    assert_unchanged(after, caches)


def test_prompt_longer_than_any_cache_gives_nan_under_jit(model):
    caches = k3jax.model.empty_caches(model.cfg, 1, 3, jnp.float32)
    tokens = jnp.zeros((1, 5), jnp.int32)
    logits, after = quick_jit(lambda m, t, c: k3jax.prefill(m, t, caches=c))(model, tokens, caches)
    assert np.isnan(logits).all()
    assert_unchanged(after, caches)


def test_row_with_two_segments_gives_nan_under_jit(model, tokens, prefill_jit):
    caches = k3jax.model.empty_caches(model.cfg, 2, CAPACITY, jnp.float32)
    ids = jnp.array([[0, 5, 0, 5], [1, 1, 2, 2]], jnp.int32)
    logits, _ = prefill_jit(model, tokens, ids, caches)
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()


def test_debug_variable_takes_effect_at_the_next_call(model, tokens, caches, monkeypatch):
    # Below the checks of concrete values, which would refuse these calls.
    wrong = tokens.at[0, 0].set(40)
    full = k3jax.model.empty_caches(model.cfg, 2, 3, jnp.float32)
    run = lambda t, c: cached._prefill(model, t, None, c, last_only=False)  # noqa: E731
    assert np.isnan(run(wrong, caches)[0]).any()
    monkeypatch.setenv("K3JAX_DEBUG", "1")
    with pytest.raises(checkify.JaxRuntimeError, match=r"token id lies outside 0\.\.39"):
        run(wrong, caches)
    with pytest.raises(checkify.JaxRuntimeError, match="4 more tokens do not fit a cache of 3"):
        run(tokens, full)
    monkeypatch.delenv("K3JAX_DEBUG")
    assert np.isnan(run(wrong, caches)[0]).any()


def test_debug_checks_reach_a_checkified_program_of_the_user(model, tokens, caches, monkeypatch):
    monkeypatch.setenv("K3JAX_DEBUG", "1")
    program = quick_jit(checkify.checkify(lambda m, t, c: k3jax.decode_step(m, t, c)))
    error, _ = program(model, tokens[:, 0], caches)
    error.throw()
    error, _ = program(model, tokens[:, 0].at[1].set(-1), caches)
    with pytest.raises(checkify.JaxRuntimeError, match="token id lies outside"):
        error.throw()


@pytest.mark.slow
def test_debug_checks_leave_right_calls_alone(model, tokens, monkeypatch):
    expected = k3jax.generate(model, tokens, max_new_tokens=2, temperature=0)
    monkeypatch.setenv("K3JAX_DEBUG", "1")
    got = k3jax.generate(model, tokens, max_new_tokens=2, temperature=0)
    np.testing.assert_array_equal(got, expected)
    # Outside of checkify the checks are nothing.
    logits = quick_jit(lambda m, t: m(t))(model, tokens.at[0, 0].set(-1))
    assert np.isnan(logits[0]).all()
    result = k3jax.trace(model, tokens)
    assert np.isfinite(result["logits"]).all()
    for function in (k3jax.trace, lambda m, t: m(t)):
        with pytest.raises(checkify.JaxRuntimeError, match="token id lies outside"):
            function(model, tokens.at[0, 0].set(-1))
