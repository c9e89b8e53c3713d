"""MXFP8 activations against the formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP8, quantize_mxfp8
from pallas_kernels.mxfp8 import reference
from tests.pallas_kernels.compare import normal


def rows():
    """Groups of many sizes, with ties, powers of two, the bound 448 and zeros."""
    x = normal(0, 12, 96) * np.exp2(np.linspace(-30, 30, 12))[:, None]
    x[0, :32] = 0
    x[1, :4] = [448, 449, 17, 0.25]
    x[2, :3] = [2.0**-9, 1.5 * 2.0**-9, 448]  # subnormal, a tie between two of them
    return np.asarray(x, np.float32)


def test_codes_and_scales_equal_exhaustive_search():
    x = rows()
    found = jax.jit(quantize_mxfp8)(x)
    codes, scales = reference.quantize(x)
    is_zero = np.abs(x).reshape(12, -1, 32).max(-1) == 0
    np.testing.assert_array_equal(np.where(is_zero, 0, found.scales), np.where(is_zero, 0, scales))
    np.testing.assert_array_equal(found.codes, codes)


def test_every_code_decodes_exactly():
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    scales = np.array([[1], [100], [126], [127], [128], [200], [254 - 9], [255]], np.uint8)
    expected = reference.dequantize(codes, scales)
    for dtype in (jnp.float32, jnp.bfloat16):
        packed = MXFP8(jnp.asarray(codes), jnp.asarray(scales))
        found = np.asarray(packed.dequantize(dtype), np.float64)
        normal_or_zero = (np.abs(expected) >= 2.0**-126) | (expected == 0) | np.isnan(expected)
        np.testing.assert_array_equal(
            np.where(normal_or_zero, found, 0), np.where(normal_or_zero, expected, 0)
        )


def test_quantised_numbers_are_within_the_mantissa():
    x = rows()
    error = np.abs(np.asarray(quantize_mxfp8(x).dequantize(jnp.float32), np.float64) - x)
    largest = np.abs(x).reshape(12, -1, 32).max(-1).repeat(32, -1)
    assert np.all(error <= np.maximum(np.abs(x) / 16, largest * 2.0**-17))


def test_groups_that_are_not_finite_are_nan():
    x = rows()
    x[0, 0], x[1, 40] = np.nan, np.inf
    is_nan = np.isnan(np.asarray(quantize_mxfp8(x).dequantize(jnp.float32)))
    assert is_nan[0, :32].all() and is_nan[1, 32:64].all() and is_nan.sum() == 64


def test_mxfp8_refuses_bad_input():
    with pytest.raises(ValueError, match=r"x \(2, 40\) must be .* multiple of 32"):
        quantize_mxfp8(jnp.zeros((2, 40)))
    with pytest.raises(TypeError, match="x has dtype int32"):
        quantize_mxfp8(jnp.zeros((2, 32), jnp.int32))
    with pytest.raises(ValueError, match=r"scales \(2, 2\) must be \(2, 1\)"):
        MXFP8(jnp.zeros((2, 32), jnp.uint8), jnp.zeros((2, 2), jnp.uint8)).check()
    with pytest.raises(TypeError, match="codes has dtype float32; packed bytes are uint8"):
        MXFP8(jnp.zeros((2, 32)), jnp.zeros((2, 1), jnp.uint8)).check()


def test_no_rows_are_quantised_to_none():
    empty = quantize_mxfp8(jnp.zeros((0, 64)))
    assert (empty.shape, empty.scales.shape) == ((0, 64), (0, 2))
    assert empty.dequantize(jnp.float32).shape == (0, 64)
