"""MXFP4: decoding exact at every scale and code, quantiser against an exhaustive search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_kernels import MXFP4
from pallas_kernels.mxfp4 import RULES, reference, xla
from tests.golden_cases import golden_case
from tests.pallas_kernels.compare import normal

BITS = {"bfloat16": np.uint16, "float32": np.uint32}


def same_bits(actual, expected) -> bool:
    """Equality of every bit, except that one NaN is as good as another."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    bits = BITS[actual.dtype.name]
    nan = np.isnan(expected.astype(np.float32))
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan)
    return np.array_equal(actual.view(bits)[~nan], expected.view(bits)[~nan])


def packed(codes, scales) -> MXFP4:
    return MXFP4(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales, jnp.uint8))


def one_group(*leading_bytes: int, scale: int) -> MXFP4:
    """One output column of 32 inputs that begins with these bytes."""
    return packed([[*leading_bytes, *(16 - len(leading_bytes)) * [0]]], [[scale]])


def every_code() -> MXFP4:
    """[32, 256]: column e has scale byte e and the codes 0..15 twice."""
    codes = np.arange(16, dtype=np.uint8)
    row = np.tile(codes[0::2] | codes[1::2] << 4, 2)
    return packed(np.tile(row, (256, 1)), np.arange(256)[:, None])


@pytest.mark.parametrize(
    ("byte", "scale", "pair"),
    [(0x21, 127, (0.5, 1.0)), (0xF9, 126, (-0.25, -3.0)), (0x7A, 128, (-2.0, 12.0))],
)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_low_half_is_the_even_column_and_the_scale_an_exponent(byte, scale, pair, implementation):
    weights = one_group(byte, scale=scale).dequantize(jnp.float32, implementation=implementation)
    assert weights.shape == (32, 1)
    assert tuple(np.asarray(weights[:2, 0])) == pair
    assert not np.any(weights[2:])


def test_codes_decode_in_order():
    column = np.asarray(every_code().dequantize(jnp.float32))[:, 127]
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(column, 2 * [*values, *(-v for v in values)])


@pytest.mark.parametrize("dtype", BITS)
def test_every_scale_and_code_is_exact(dtype):
    expected = reference.decode_table(dtype)  # the formula in float64 [256, 16]
    assert np.isfinite(expected[:253].astype(np.float32)).all()
    assert np.isnan(expected[255].astype(np.float32)).all()
    assert 0 < float(expected[0, 1]) == 2.0**-128  # subnormal, and not flushed
    matrix = every_code()
    for decode in (
        jax.jit(lambda m: m.dequantize(dtype)),
        lambda m: m.dequantize(dtype, implementation="reference"),
    ):
        assert same_bits(np.asarray(decode(matrix)).T, np.tile(expected, 2))
    even, odd = jax.jit(xla.decode_columns, static_argnums=2)(
        matrix.codes, matrix.scales, jnp.dtype(dtype)
    )
    assert same_bits(even, np.tile(expected[:, 0::2], 2))
    assert same_bits(odd, np.tile(expected[:, 1::2], 2))


def test_columns_for_one_row_are_exact_but_for_subnormals():
    expected = reference.decode_table("float32").astype(np.float64)
    expected[np.abs(expected) < 2.0**-126] = 0
    matrix = every_code()
    factors, of_sums = jax.jit(xla.stream_scales)(matrix.scales)
    np.testing.assert_array_equal(of_sums[:255], [1] * 241 + [2**14] * 14)
    columns = jax.jit(xla.stream_columns)(matrix.codes, factors)
    for actual, wanted in zip(columns, (expected[:, 0::2], expected[:, 1::2]), strict=True):
        # In float64, where what float32 cannot hold is not infinite: the sum decides.
        actual = np.asarray(actual, np.float64) * np.asarray(of_sums)[:, None]
        actual[np.abs(actual) >= 2.0**128] = np.inf * np.sign(actual[np.abs(actual) >= 2.0**128])
        np.testing.assert_array_equal(actual, np.tile(wanted, 2))


def test_golden_experts_decode_exactly():
    case = golden_case("mxfp4")
    stored = {}
    for shard in case.checkpoint.glob("*.safetensors"):
        stored |= load_file(shard)
    names = [name for name in case.arrays if name.startswith("dequant.")]
    assert len(names) > 20
    for name in names:
        stem = "language_model.model." + name.removeprefix("dequant.")
        matrix = packed(stored[f"{stem}_packed"], stored[f"{stem}_scale"])
        assert same_bits(np.asarray(matrix.dequantize()).T, case.arrays[name]), name


def weights_of_all_sizes(seed: int) -> np.ndarray:
    """[96, 300] float32 from the smallest subnormal to 2^120, with ties, zeros and -0."""
    random = np.random.default_rng(seed)
    exponents = random.integers(-149, 120, size=(3, 300)).repeat(32, 0)
    weights = random.normal(size=(96, 300)) * np.exp2(exponents)
    ties = random.integers(-24, 25, size=(96, 300)) / 4 * np.exp2(exponents)
    weights = np.where(random.random((96, 300)) < 0.3, ties, weights).astype(np.float32)
    weights[:32, 0], weights[32:64, 0], weights[::3, 1] = 0.0, -0.0, -0.0
    return weights


@pytest.mark.parametrize("rule", RULES)
def test_quantiser_equals_the_search(rule):
    weights = weights_of_all_sizes(0)
    matrix = MXFP4.quantize(jnp.asarray(weights), rule=rule)
    codes, scales = reference.quantize(weights, rule)
    np.testing.assert_array_equal(matrix.codes, codes)
    np.testing.assert_array_equal(matrix.scales, scales)


@pytest.mark.parametrize("rule", RULES)
def test_quantiser_is_idempotent(rule):
    for weights in (weights_of_all_sizes(1), 0.02 * normal(2, 96, 300)):
        matrix = MXFP4.quantize(jnp.asarray(weights, jnp.float32), rule=rule)
        for dtype in BITS:
            values = matrix.dequantize(dtype)
            again = MXFP4.quantize(values, rule=rule)
            assert same_bits(again.dequantize(dtype), values)
            changed = np.mean(np.asarray(again.scales != matrix.scales))
            if rule == "ceil":  # 3 is written as 6 at half the scale
                assert changed > 0
            else:
                assert changed == 0
                np.testing.assert_array_equal(again.codes, matrix.codes)


@pytest.mark.parametrize(
    ("rule", "error", "clipped"),
    [("floor", 0.01302, 0.43), ("ceil", 0.01403, 0), ("even", 0.01255, 0.28)],
)
def test_error_of_normal_weights_is_that_of_the_rule(rule, error, clipped):
    weights = jnp.asarray(0.02 * normal(5, 32, 30000), jnp.float32)
    matrix = MXFP4.quantize(weights, rule=rule)
    difference = matrix.dequantize(jnp.float32) - weights
    assert abs(jnp.square(difference).sum() / jnp.square(weights).sum() / error - 1) < 0.015
    largest = jnp.abs(weights).max(0) / jnp.exp2(matrix.scales[:, 0].astype(jnp.float32) - 127)
    assert abs(jnp.mean(largest > 6) - clipped) < 0.01


def test_group_with_a_number_that_is_not_finite_becomes_nan():
    weights = jnp.ones((64, 3)).at[5, 1].set(jnp.inf).at[40, 2].set(jnp.nan)
    matrix = MXFP4.quantize(weights)
    np.testing.assert_array_equal(matrix.scales == 255, [[0, 0], [1, 0], [0, 1]])
    assert np.isnan(matrix.dequantize()).sum() == 64


def test_leading_dimensions_and_tree_functions():
    weights = jnp.asarray(normal(6, 2, 3, 64, 5), jnp.bfloat16)
    matrix = MXFP4.quantize(weights)
    assert matrix.codes.shape == (2, 3, 5, 32) and matrix.scales.shape == (2, 3, 5, 2)
    assert matrix.shape == weights.shape and matrix.ndim == 4
    whole = matrix.dequantize()
    assert whole.shape == weights.shape and whole.dtype == jnp.bfloat16
    one = jax.tree.map(lambda a: a[1, 2], matrix)
    assert same_bits(one.dequantize(), whole[1, 2])
    abstract = jax.eval_shape(lambda w: MXFP4.quantize(w, rule="ceil"), weights)
    assert abstract.shape == weights.shape and abstract.codes.dtype == jnp.uint8


def test_mxfp4_refuses_bad_input():
    with pytest.raises(ValueError, match=r"weights \(33, 4\) must be .* multiple of 32"):
        MXFP4.quantize(jnp.zeros((33, 4)))
    with pytest.raises(ValueError, match="rule='nearest' must be one of floor, even, ceil"):
        MXFP4.quantize(jnp.zeros((32, 4)), rule="nearest")
    with pytest.raises(TypeError, match="weights has dtype int32"):
        MXFP4.quantize(jnp.zeros((32, 4), jnp.int32))
    with pytest.raises(ValueError, match=r"codes \(4, 17\) must be .* in a multiple of 32"):
        packed(np.zeros((4, 17)), np.zeros((4, 1))).dequantize()
    with pytest.raises(ValueError, match=r"scales \(4, 2\) must be \(4, 1\), one per 32 input"):
        packed(np.zeros((4, 16)), np.zeros((4, 2))).dequantize()
    with pytest.raises(TypeError, match="scales has dtype int8; packed bytes are uint8"):
        MXFP4(jnp.zeros((4, 16), jnp.uint8), jnp.zeros((4, 1), jnp.int8)).dequantize()
    with pytest.raises(NotImplementedError, match="'mosaic_tpu' is not built"):
        one_group(scale=1).dequantize(implementation="mosaic_tpu")


@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
@pytest.mark.parametrize("value", [2.5e38, 3e38, -3.4e38])
def test_largest_weights_saturate_at_finite_numbers(rule, value):
    weights = jnp.zeros((32, 1)).at[0].set(value)
    packed = MXFP4.quantize(weights, rule=rule)
    decoded = packed.dequantize(jnp.float32)
    assert np.isfinite(decoded).all() and abs(float(decoded[0, 0])) >= 2e38
    again = MXFP4.quantize(decoded, rule=rule).dequantize(jnp.float32)
    np.testing.assert_array_equal(again, decoded)
    codes, scales = reference.quantize(np.asarray(weights), rule)
    np.testing.assert_array_equal(packed.codes, codes)
    np.testing.assert_array_equal(packed.scales, scales)


@pytest.mark.parametrize("shape", [(32, 0), (0, 32, 4), (0, 4)])
def test_empty_weights_are_refused(shape):
    with pytest.raises(ValueError, match="not empty"):
        MXFP4.quantize(jnp.zeros(shape))


def test_messages_bear_one_name():
    with pytest.raises(ValueError, match=r"MXFP4: weights \(0, 32, 4\) must be .*, not empty"):
        MXFP4.quantize(jnp.zeros((0, 32, 4)))
    with pytest.raises(TypeError, match="MXFP4: dtype=int8 is not a float type"):
        MXFP4.quantize(jnp.ones((32, 4))).dequantize(jnp.int8)
