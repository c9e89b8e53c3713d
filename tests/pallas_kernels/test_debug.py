"""Checks of values: free ones always, the others in debug mode."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import debug_checks, kda, kda_decode, mla_attention, mla_decode
from pallas_kernels.debug import is_debugging
from tests.pallas_kernels.compare import normal

B, T, H, K = 2, 6, 1, 4


def _arguments(**change):
    arrays = {name: normal(n, B, T, H, K) for n, name in enumerate(("q", "k", "v"))}
    arrays |= {"log_decay": -np.ones((B, T, H, K)), "beta": np.ones((B, T, H))}
    return {name: jnp.asarray(x, jnp.float32) for name, x in (arrays | change).items()}


GROWING = np.where(np.arange(T)[:, None, None] == 4, 0.25, -1) * np.ones((B, T, H, K))
BAD = [
    ({"log_decay": GROWING}, {}, "log_decay holds 0.25, above 0"),
    ({}, {"log_decay_min": -0.5}, "holds -1, below the promised log_decay_min=-0.5"),
    ({}, {"segment_ids": jnp.array([[1, 1, 0, 2, 2, 0], [5, 0, 3, 3, 3, 3]])}, "ids decrease"),
    ({}, {"state_positions": jnp.array([[1, 2], [3, 2]])}, "positions decrease"),
    ({}, {"state_positions": jnp.array([[-1, 2], [3, 4]])}, "positions hold -1, outside 0..6"),
    ({}, {"state_positions": jnp.array([[1, 2], [3, 7]])}, "positions hold 7, outside 0..6"),
]


@pytest.mark.parametrize(("change", "options", "message"), BAD)
def test_compiled_programs_raise_in_debug_mode_only(change, options, message):
    arguments = _arguments(**change)
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in options.items() if name not in arrays}

    def run(arguments, arrays):
        return kda(**arguments, **arrays, **static, implementation="reference")

    jax.block_until_ready(jax.jit(run)(arguments, arrays))
    with debug_checks(), pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(lambda *a: run(*a))(arguments, arrays))


@pytest.mark.parametrize(("change", "options", "message"), BAD)
def test_concrete_values_are_refused_before_anything_runs(change, options, message):
    with debug_checks(), pytest.raises(ValueError, match=message):
        kda(**_arguments(**change), **options)
    if "ids" not in message:
        with pytest.raises(ValueError, match=message):
            kda(**_arguments(**change), **options)


def test_decay_of_nan_is_reported_in_debug_mode_only():
    arguments = _arguments(log_decay=np.where(GROWING > 0, np.nan, -1))
    assert np.isnan(kda(**arguments)[0]).any()
    with debug_checks(), pytest.raises(ValueError, match="log_decay holds NaN"):
        kda(**arguments)
    with debug_checks():
        ids = jnp.asarray(np.arange(T) != 4, jnp.int32) * jnp.ones((B, 1), jnp.int32)
        assert np.isfinite(kda(**arguments, segment_ids=ids)[0]).all()


def test_values_of_absent_tokens_are_not_looked_at():
    with debug_checks():
        ids = jnp.asarray(np.arange(T) != 4, jnp.int32) * jnp.ones((B, 1), jnp.int32)
        output, _ = kda(**_arguments(log_decay=GROWING), segment_ids=ids)
    assert np.isfinite(output).all()


def test_switch_and_variable_turn_checks_on_and_off(monkeypatch):
    monkeypatch.delenv("K3JAX_DEBUG", raising=False)
    assert not is_debugging()
    with debug_checks():
        assert is_debugging()
        with debug_checks(enabled=False):
            assert not is_debugging()
    monkeypatch.setenv("K3JAX_DEBUG", "1")
    assert is_debugging()


def test_numpy_arrays_of_float64_are_taken_quietly():
    q, k, v = (normal(n, B, T, H, K) for n in range(3))
    tokens = (q, k, v, -np.ones((B, T, H, K)), np.ones((B, T, H)))
    table, lengths = np.array([[0], [1]]), np.array([3, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [
            *kda(*tokens), *kda_decode(*tokens, normal(3, B, H, K, K)),
            mla_attention(q, k, v, scale=1.0),
            mla_decode(q, normal(4, 3, 5, K), table, lengths, scale=1.0, value_width=2),
        ]  # fmt: skip
    assert {result.dtype.name for result in results} == {"float32"}
