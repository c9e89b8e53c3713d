"""The spellings that the benchmark compares with compute the same thing."""

import jax
import jax.numpy as jnp
import pytest

from experiments.bench_kda import BenchConfig, make_inputs
from experiments.kda_baselines import TOKEN_SCANS, baseline_chunked
from pallas_kernels import kda
from tests.tolerances import assert_close

FORMS = {"baseline_chunked": baseline_chunked, **TOKEN_SCANS}


@pytest.mark.parametrize("name", FORMS)
def test_baseline_equals_kda_in_values_and_gradients(name):
    inputs = make_inputs(BenchConfig(heads=2, key_dim=16, value_dim=8), 128)

    def gradients(function):
        def loss(inputs):
            output, state = function(*inputs)
            return jnp.sum(output**2) + jnp.sum(jnp.sin(state)), (output, state)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)

    (_, expected), expected_gradients = gradients(lambda *a: kda(*a, implementation="reference"))
    (_, actual), actual_gradients = gradients(FORMS[name])
    for one, two in zip(actual, expected, strict=True):
        assert_close(one, two)
    for one, two in zip(actual_gradients, expected_gradients, strict=True):
        assert_close(one, two, gradient=True)


def test_bad_benchmark_length_is_named():
    with pytest.raises(ValueError, match=r"tokens=100 must be a multiple of 64.*try 64"):
        BenchConfig(tokens=100)
