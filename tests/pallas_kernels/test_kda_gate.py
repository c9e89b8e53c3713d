import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda_gate
from tests.pallas_kernels.compare import normal
from tests.tolerances import assert_close


def _scalar(logit, A_log, lower_bound):
    gate = kda_gate(
        jnp.full((1, 1, 1, 1), logit),
        jnp.array([A_log]),
        jnp.zeros((1, 1)),
        lower_bound=lower_bound,
    )
    return float(gate[0, 0, 0, 0])


def test_bounded_gate_is_a_scaled_sigmoid():
    for logit, expected in ((0.0, -2.5), (1.0, -3.6553), (10.0, -4.99977)):
        assert abs(_scalar(logit, 0.0, -5.0) - expected) < 1e-4
    assert abs(_scalar(1.0, math.log(2), -5.0) + 4.40399) < 1e-4


def test_unbounded_gate_is_a_scaled_softplus_that_ends_as_the_identity():
    for logit, expected in ((0.0, -0.6931), (1.0, -1.3133), (10.0, -10.00005), (21.0, -21.0)):
        assert abs(_scalar(logit, 0.0, None) - expected) < 1e-4
    assert abs(_scalar(1.0, math.log(2), None) + 2 * 1.31326) < 1e-4


def test_gate_has_one_rate_per_head():
    A_log = jnp.log(jnp.array([1.0, 2.0, 3.0]))
    gate = kda_gate(jnp.ones((1, 1, 3, 4)), A_log, jnp.zeros((3, 4)), lower_bound=-5.0)
    expected = np.array([-3.6553, -4.4040, -4.7629])[:, None] * np.ones(4)
    assert np.max(np.abs(gate[0, 0] - expected)) < 1e-4


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate_gradients_are_finite_and_right_at_saturation(lower_bound):
    logits = np.concatenate([normal(0, 1, 4, 2, 3), [[[[-1e4, 1e4, 25.0]] * 2]]], axis=1)
    A_log, bias = np.array([0.5, 1.0]), normal(1, 2, 3)

    def gradients(dtype):
        def loss(logits, A_log, bias):
            gate = kda_gate(logits, A_log, bias, lower_bound=lower_bound)
            assert gate.dtype == dtype
            return jnp.sum(jnp.sin(gate / 100))

        return jax.grad(loss, (0, 1, 2))(*(jnp.asarray(x, dtype) for x in (logits, A_log, bias)))

    actual = gradients(jnp.float32)
    with jax.enable_x64(True):
        exact = gradients(jnp.float64)
    for one, two in zip(actual, exact, strict=True):
        assert_close(one, two, gradient=True)


def test_gate_accepts_flat_bias_and_returns_float32():
    logits, A_log = jnp.asarray(normal(0, 2, 5, 3, 4), jnp.bfloat16), jnp.zeros(3)
    bias = jnp.asarray(normal(1, 3, 4), jnp.float32)
    gate = kda_gate(logits, A_log, bias, lower_bound=-5.0)
    assert gate.dtype == jnp.float32
    np.testing.assert_array_equal(gate, kda_gate(logits, A_log, bias.ravel(), lower_bound=-5.0))


@pytest.mark.parametrize(
    ("A_log", "dt_bias", "lower_bound", "message"),
    [
        ((4,), (3, 4), None, r"A_log has shape \(4,\); expected \(3,\), one value per head"),
        ((3, 1), (3, 4), None, r"A_log has shape \(3, 1\)"),
        ((3,), (4, 3), None, r"dt_bias has shape \(4, 3\); expected \(3, 4\) or \(12,\)"),
        ((3,), (3, 4), 5.0, "lower_bound=5.0 must be negative"),
    ],
)
def test_bad_gate_input_is_named(A_log, dt_bias, lower_bound, message):
    logits = jnp.zeros((1, 2, 3, 4))
    with pytest.raises(ValueError, match=message):
        kda_gate(logits, jnp.zeros(A_log), jnp.zeros(dt_bias), lower_bound=lower_bound)
