"""Grouped products with MXFP4 weights against the product with the decoded matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, SituGLU, grouped_glu, grouped_matmul, quantize_mxfp8
from pallas_kernels.grouped_matmul import packed
from tests.pallas_kernels.compare import (
    DATA,
    assert_matches_definition,
    assert_same_per_device,
    normal,
    values_and_gradients,
)
from tests.tolerances import assert_close


def packed_weights(num_groups, inputs, outputs, seed=1) -> MXFP4:
    return MXFP4.quantize(jnp.asarray(normal(seed, num_groups, inputs, outputs), jnp.float32))


# rows, inputs, outputs, group sizes, dtype
CASES = {
    "uneven": (97, 64, 40, (0, 33, 0, 1, 60, 2), "float32"),
    "few rows": (8, 64, 70, (0, 1, 2, 0, 0, 3, 1, 0, 0), "bfloat16"),
    "one row": (1, 64, 70, (0, 1, 0), "float32"),
    "part of one matrix": (40, 96, 33, (21,), "bfloat16"),
    "no rows used": (3, 32, 4, (0,), "float32"),
}


@pytest.mark.parametrize("case", CASES)
def test_packed_product_and_gradient_match_definition(case):
    rows, inputs, outputs, group_sizes, dtype = CASES[case]
    sizes = np.array(group_sizes, np.int32)
    weights = packed_weights(len(sizes), inputs, outputs)

    def op(implementation, x):
        return grouped_matmul(x, weights, sizes, implementation=implementation)

    (output,), (d_x,) = assert_matches_definition(op, (normal(0, rows, inputs),), dtype)
    total = sum(group_sizes)
    assert not np.any(output[total:]) and not np.any(d_x[total:])


def test_blocks_that_overlap_and_tiles_that_reach_over_agree(monkeypatch):
    monkeypatch.setattr(
        packed,
        "TILES",
        packed.PackedTiles(
            alone=2,
            alone_below=8,
            alone_bytes=16 * 30,
            smallest=4,
            largest=32,
            largest_single=32,
            few_rows=8,
            few_weights=64 * 7,
            weights=64 * 30,
        ),
    )
    rows, sizes = 28, jnp.array([21, 1, 0, 4])
    weights = packed_weights(4, 64, 70)
    x, cotangent = (jnp.asarray(normal(n, rows, k), jnp.float32) for n, k in ((0, 64), (1, 70)))
    past = jnp.arange(rows)[:, None] >= rows - 2
    op = lambda weights: lambda x: grouped_matmul(x, weights, sizes)  # noqa: E731
    nan = lambda a: jnp.where(past, jnp.nan, a)  # noqa: E731
    (output,), (d_x,) = values_and_gradients(op(weights), (nan(x),), [nan(cotangent)])
    decoded = weights.dequantize(jnp.float32)
    (expected,), (expected_d_x,) = values_and_gradients(op(decoded), (x,), [cotangent])
    assert_close(output, expected)
    assert_close(d_x, expected_d_x, gradient=True)


def test_blocks_cover_a_dimension_with_equal_widths():
    blocks = packed._Blocks.of(70, 30)
    assert (blocks.number, blocks.width) == (3, 24)
    assert [int(blocks.start(i)) for i in range(3)] == [0, 24, 46]
    blocks = packed._Blocks.of(48, 20, 16)
    assert (blocks.number, blocks.width) == (3, 16)
    assert packed._Blocks.of(5, 0).width == 1


def test_scale_byte_255_poisons_its_output_column_only():
    weights = packed_weights(1, 64, 3)
    weights = MXFP4(weights.codes, weights.scales.at[0, 1, 0].set(255))
    for rows in (1, 20):
        output = jax.jit(grouped_matmul)(jnp.ones((rows, 64)), weights, jnp.array([rows]))
        np.testing.assert_array_equal(np.isnan(output).all(0), [False, True, False])
        assert np.isnan(output).sum() == rows


def test_packed_product_of_no_rows_is_empty():
    output = grouped_matmul(jnp.zeros((0, 32)), packed_weights(2, 32, 4), jnp.zeros(2, jnp.int32))
    assert output.shape == (0, 4)


def test_weights_that_are_multiplied_are_constants():
    weights, sizes = packed_weights(2, 32, 4), jnp.array([2, 3])
    x = jnp.ones((5, 32))
    gradient = jax.jit(
        jax.grad(lambda x, w: grouped_matmul(x, w, sizes).sum(), argnums=(0, 1), allow_int=True)
    )(x, weights)
    assert gradient[0].shape == x.shape
    assert all(leaf.dtype == jax.dtypes.float0 for leaf in jax.tree.leaves(gradient[1]))


def test_packed_product_needs_no_decoded_copy_of_the_matrices():
    weights = jax.ShapeDtypeStruct((8, 1024, 512), jnp.uint8)
    scales = jax.ShapeDtypeStruct((8, 1024, 32), jnp.uint8)
    x = jax.ShapeDtypeStruct((1, 1024), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled = jax.jit(grouped_matmul).lower(x, MXFP4(weights, scales), sizes).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1 << 18  # one decoded matrix takes 2 MiB
    assert memory.argument_size_in_bytes < 0.27 * (8 * 1024 * 1024 * 2)


def test_packed_product_per_device_equals_one_device():
    weights = packed_weights(3, 32, 5)

    def op(x, sizes):
        return [grouped_matmul(x, weights, sizes.reshape(-1, 3)[0])]

    def whole(x, sizes):
        halves = zip(jnp.split(x, 2), jnp.split(sizes, 2), strict=True)
        return [jnp.concatenate([op(half, own)[0] for half, own in halves])]

    sizes = np.array([4, 0, 16, 7, 8, 2])
    assert_same_per_device(op, (normal(0, 40, 32), sizes), [DATA, DATA], [DATA], one_device=whole)


@pytest.mark.slow
def test_quantised_rows_stand_for_their_numbers():
    gate, up, sizes = packed_weights(3, 64, 40), packed_weights(3, 64, 40, 2), jnp.array([5, 0, 9])
    rows = quantize_mxfp8(jnp.asarray(normal(0, 16, 64), jnp.bfloat16))
    decoded = rows.dequantize(jnp.bfloat16)
    for implementation in ("reference", "xla"):
        found, expected = (
            (
                grouped_matmul(x, gate, sizes, implementation=implementation),
                grouped_glu(
                    x, gate, up, sizes, activation=SituGLU(4.0), implementation=implementation
                ),
            )
            for x in (rows, decoded)
        )
        for actual, exact in zip(found, expected, strict=True):
            assert actual.dtype == jnp.bfloat16
            np.testing.assert_array_equal(actual, exact)


def test_packed_product_refuses_bad_input():
    weights, sizes = packed_weights(2, 32, 4), jnp.array([2, 3])
    with pytest.raises(ValueError, match=r"weights \(2, 32, 4\) .* cannot multiply x \(6, 64\)"):
        grouped_matmul(jnp.zeros((6, 64)), weights, sizes)
    with pytest.raises(ValueError, match=r"grouped_matmul: scales \(2, 4\) must be \(2, 4, 1\)"):
        grouped_matmul(jnp.zeros((6, 32)), MXFP4(weights.codes, weights.scales[..., 0]), sizes)
    with pytest.raises(ValueError, match=r"group_sizes has shape \(3,\); expected \(2,\)"):
        grouped_matmul(jnp.zeros((6, 32)), weights, jnp.array([2, 3, 1]))
    with pytest.raises(TypeError, match="x is MXFP8; weights must be MXFP4, not float32"):
        grouped_matmul(quantize_mxfp8(jnp.zeros((6, 32))), jnp.zeros((2, 32, 4)), sizes)
    with pytest.raises(TypeError, match="one of gate and up is MXFP4 and the other is not"):
        grouped_glu(
            jnp.zeros((6, 32)), weights, jnp.zeros((2, 32, 4)), sizes, activation=SituGLU(4.0)
        )


def test_numpy_arrays_are_taken():
    weights = MXFP4.quantize(jax.random.normal(jax.random.key(0), (1, 32, 3)))
    on_host = MXFP4(np.asarray(weights.codes), np.asarray(weights.scales))
    expected = grouped_matmul(jnp.ones((2, 32)), weights, jnp.array([2]))
    found = grouped_matmul(np.ones((2, 32), np.float32), on_host, np.array([2]))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("group_sizes", [(3, 0, 2), (25, 0, 14)])
def test_packed_product_in_64_bit_mode(group_sizes):
    """Counters of loops are int64 there; float64 rows keep their precision."""
    with jax.enable_x64(True):
        weights, sizes = packed_weights(3, 32, 6), jnp.array(group_sizes, jnp.int32)

        def op(implementation, x):
            return grouped_matmul(x, weights, sizes, implementation=implementation)

        x = jnp.asarray(normal(0, 40, 32), jnp.float64)
        value, pull_back = jax.vjp(lambda x: op("xla", x), x)
        expected, expected_pull_back = jax.vjp(lambda x: op("reference", x), x)
        assert value.dtype == jnp.float64
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(
            pull_back(value)[0], expected_pull_back(value)[0], rtol=1e-12, atol=1e-12
        )
        found = op("xla", x.astype(jnp.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
