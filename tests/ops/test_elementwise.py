"""Norms and activations against float64, at ordinary and extreme inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import ops
from tests.tolerances import assert_close

EXTREME = np.array(
    [
        0.0,
        -0.0,
        1e-30,
        -1e-30,
        1e-8,
        1e-4,
        0.3,
        -0.7,
        1,
        -3,
        20,
        -20,
        88,
        -88,
        1e3,
        -1e3,
        1e4,
        -1e4,
    ],
    np.float32,
)
GRID = [a.reshape(-1) for a in np.meshgrid(EXTREME, EXTREME)]


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(x, np.float64)))


def situ_definition(a, b, beta, linear_beta):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if linear_beta is not None:
        b = linear_beta * np.tanh(b / linear_beta)
    return beta * np.tanh(a / beta) * sigmoid(a) * b


@pytest.mark.parametrize(("beta", "linear_beta"), [(4.0, 25.0), (1.0, None), (4.0, None)])
def test_situ_equals_its_formula(beta, linear_beta):
    a, b = GRID
    expected = situ_definition(a, b, beta, linear_beta)
    got = ops.situ(a, b, beta, linear_beta)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-30)
    if linear_beta is not None:
        assert np.abs(got).max() <= beta * linear_beta
    gradients = jax.vmap(jax.grad(ops.situ, (0, 1)), (0, 0, None, None))(a, b, beta, linear_beta)
    assert all(np.isfinite(g).all() for g in gradients)


def test_situ_gradient_equals_differences():
    a, b = (g[np.abs(g) < 50].astype(np.float64) for g in (EXTREME, EXTREME))
    a, b = (g.reshape(-1) for g in np.meshgrid(a, b))
    step = 1e-6
    for number in range(2):
        ends = [[a, b], [a, b]]
        ends[0][number], ends[1][number] = ends[0][number] - step, ends[1][number] + step
        low, high = (situ_definition(*e, 4.0, 25.0) for e in ends)
        got = jax.vmap(jax.grad(ops.situ, number), (0, 0, None, None))(
            a.astype(np.float32), b.astype(np.float32), 4.0, 25.0
        )
        assert_close(got, (high - low) / (2 * step), gradient=True)


def test_situ_of_bfloat16_is_rounded_once():
    a, b = (g.astype(jnp.bfloat16) for g in GRID)
    expected = situ_definition(a, b, 4.0, 25.0).astype(jnp.bfloat16)
    got = ops.situ(a, b, 4.0, 25.0)
    assert got.dtype == jnp.bfloat16
    # The float32 result may lie on the other side of a rounding boundary.
    np.testing.assert_allclose(
        got.astype(jnp.float32), expected.astype(np.float32), rtol=2**-8, atol=1e-30
    )


def test_swiglu_equals_its_formula():
    a, b = GRID
    expected = np.asarray(a, np.float64) * sigmoid(a) * b
    # Below about -88 float32 has no exponential left; the value is then smaller than 1e-30.
    np.testing.assert_allclose(ops.swiglu(a, b), expected, rtol=2e-5, atol=1e-29)


SCALES = [0.0, 1e-20, 1e-3, 1.0, 1e4, 1e15]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_equals_its_formula(scale, eps):
    random = np.random.default_rng(0)
    x = (scale * random.standard_normal((3, 7))).astype(np.float32)
    weight = random.standard_normal(7).astype(np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight
    assert_close(ops.rms_norm(x, weight, eps), expected)
    gradient = jax.grad(lambda x: (ops.rms_norm(x, weight, eps) ** 2).sum())(x)
    assert np.isfinite(gradient).all()


def test_latent_norm_uses_its_own_epsilon():
    """Mean square 1e-6 is scaled by 707.1, not by 301.5."""
    x = jnp.full((8,), 1e-3)
    np.testing.assert_allclose(ops.rms_norm(x, jnp.ones(8), 1e-6) / x, 707.1, rtol=1e-4)
    np.testing.assert_allclose(ops.rms_norm(x, jnp.ones(8), 1e-5) / x, 301.5, rtol=1e-4)


def test_rms_norm_of_bfloat16_casts_before_the_weight():
    random = np.random.default_rng(1)
    x = jnp.asarray(random.standard_normal((5, 16)), jnp.bfloat16)
    weight = jnp.asarray(random.standard_normal(16), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    expected = jnp.asarray(normed, jnp.bfloat16) * weight
    got = ops.rms_norm(x, weight, 1e-5)
    assert got.dtype == jnp.bfloat16
    same = np.asarray(got, np.float32) == np.asarray(expected, np.float32)
    assert same.mean() > 0.95  # a float32 rounding decides the others


@pytest.mark.parametrize("scale", SCALES)
def test_l2_normalize_equals_its_formula(scale):
    x = (scale * np.random.default_rng(0).standard_normal((3, 5))).astype(np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 1e-6)
    assert_close(ops.l2_normalize(x), expected)
    assert np.isfinite(jax.grad(lambda x: ops.l2_normalize(x).sum())(x)).all()
    assert ops.l2_normalize(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gated_norm_equals_its_formula(dtype):
    random = np.random.default_rng(2)
    x = jnp.asarray(random.standard_normal((4, 3, 8)), dtype)
    gate = jnp.asarray(10 * random.standard_normal((4, 3, 8)), dtype)
    weight = random.standard_normal(8).astype(np.float32)
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    expected = normed * weight * sigmoid(np.asarray(gate, np.float64))
    got = ops.gated_rms_norm(x, weight, gate, 1e-5)
    assert got.dtype == dtype
    assert_close(got, expected, dtype)
