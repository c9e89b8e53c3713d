"""The Hopper kernels of grouped products, interpreted, against the definition in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import MXFP4, grouped_matmul, quantize_mxfp8
from pallas_kernels.grouped_matmul.mosaic_gpu_matrices import MatrixTiles
from pallas_kernels.grouped_matmul.mosaic_gpu_plan import plan_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import RowTiles
from pallas_kernels.tiles import with_tiles
from tests.kernels.errors import assert_within
from tests.kernels.grouped_cases import assert_as_definition, gated, matrices, product
from tests.pallas_kernels.compare import normal

# One block and small tiles: few rows reach every part of the kernels.
TILES = {
    "grouped_rows_gpu": RowTiles(columns=64, stages=2, blocks=1),
    "grouped_few_rows_gpu": RowTiles(rows=64, columns=128, stages=3, blocks=1),
    "grouped_packed_gpu": RowTiles(columns=64, stages=2, chunk=64, blocks=1),
    "grouped_few_packed_gpu": RowTiles(rows=64, columns=64, stages=3, chunk=64, blocks=1),
    "grouped_matrices_gpu": MatrixTiles(columns=64, stages=2, chunk=64, blocks=1),
}
TWO_BLOCKS = {name: dataclasses.replace(tiles, blocks=2) for name, tiles in TILES.items()}


def compare(op, rows, sizes, weights, dtype="bfloat16", mode="gpu", tiles=TILES):
    """Values and all gradients of the interpreted kernels against float64."""
    with pallas_kernels.interpreted(mode), with_tiles(**tiles):
        assert_as_definition(op(sizes), rows, sizes, weights, "mosaic_gpu", dtype)


def several(number, sizes, width, columns, dtype="bfloat16"):
    return [matrices(1 + n, sizes, width, columns, dtype) for n in range(number)]


def packed(number, sizes, width, columns):
    return [MXFP4.quantize(w) for w in several(number, sizes, width, columns, "float32")]


def test_product_and_gradients_match_definition():
    compare(product, normal(0, 143, 72), (130, 7), several(1, (130, 7), 72, 40))


@pytest.mark.slow
def test_gated_product_and_gradients_match_definition():
    compare(gated, normal(0, 150, 40), (140, 9), several(2, (140, 9), 40, 72))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(0, 0), (1,), (63, 1, 64, 65), (64, 128), (300, 5, 0), (2, 3, 4, 5)], ids=str
)
def test_group_sizes_match_definition(sizes):
    rows = max(sum(sizes), 1) + (0 if sizes == (64, 128) else 3)
    compare(product, normal(0, rows, 64), sizes, several(1, sizes, 64, 64), tiles=TWO_BLOCKS)


@pytest.mark.slow
def test_float32_matches_definition():
    sizes = (30, 0, 40)
    compare(product, normal(0, 80, 70), sizes, several(1, sizes, 70, 40, "float32"), "float32")
    compare(gated, normal(0, 80, 70), sizes, several(2, sizes, 70, 40, "float32"), "float32")


@pytest.mark.slow
def test_packed_product_matches_definition():
    sizes = (0, 9, 3)
    x, (weights,) = jnp.bfloat16(normal(0, 15, 96)), packed(1, sizes, 96, 40)
    with pallas_kernels.interpreted("gpu"), with_tiles(**TILES):
        output = grouped_matmul(x, weights, jnp.array(sizes), implementation="mosaic_gpu")
    exact = grouped_matmul(x.astype(jnp.float32), weights, jnp.array(sizes))
    assert_within(output, exact, "bfloat16")


@pytest.mark.slow
def test_packed_products_and_gradients_match_definition():
    sizes, few = (130, 25), (3, 20)
    compare(product, normal(0, 160, 160), sizes, packed(1, sizes, 160, 136))
    compare(gated, normal(0, 160, 160), sizes, packed(2, sizes, 160, 136), tiles=TWO_BLOCKS)
    compare(gated, normal(0, 26, 160), few, packed(2, few, 160, 136))


@pytest.mark.slow
def test_all_codes_and_scales_are_decoded():
    """Rows of the unit matrix pick out each weight; scale bytes up to the largest numbers."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 4, 64)[:, np.arange(64) % 4]
    scales = np.array([1, 2, 119, 120, 127, 130, 240, 241, 252], np.uint8)
    scales = np.resize(scales, (1, 64, 4))
    weights = MXFP4(jnp.asarray(codes), jnp.asarray(scales))
    x = jnp.eye(128, dtype=jnp.bfloat16)
    with pallas_kernels.interpreted("gpu"), with_tiles(**TILES):
        output = grouped_matmul(x, weights, jnp.array([128]), implementation="mosaic_gpu")
    expected = np.asarray(weights.dequantize(jnp.float32)[0])
    is_normal = np.abs(expected) > 2.0**-126  # this processor flushes others
    np.testing.assert_array_equal(np.asarray(output, np.float32)[is_normal], expected[is_normal])


@pytest.mark.slow
def test_mxfp8_rows_match_definition():
    rows = quantize_mxfp8(jnp.asarray(normal(0, 40, 96), jnp.float32))
    compare(product, rows, (30, 0, 7), packed(1, (30, 0, 7), 96, 40))


@pytest.mark.slow
def test_kernels_have_no_races():
    sizes, few = (130, 7), (3, 9)
    compare(gated, normal(0, 140, 64), sizes, several(2, sizes, 64, 64), mode="gpu_races")
    compare(product, normal(0, 12, 128), few, packed(1, few, 128, 128), mode="gpu_races")


def test_plan_multiplies_few_rows_more_than_there_are():
    """Skewed groups of a rank of 64: 28 of 896 experts, 131072 rows."""
    share = 1 / np.arange(2, 30)
    ends = np.round(np.cumsum(share) / share.sum() * 131072)
    plan = plan_rows(jnp.asarray(np.diff(ends, prepend=0), jnp.int32), 131072, 128)
    num_tiles = int(plan.num_tiles[0])
    assert (np.asarray(plan.groups[:num_tiles]) < 28).all()
    assert num_tiles * 128 <= 1.05 * 131072
    own = plan.lasts[:num_tiles] - plan.firsts[:num_tiles]
    assert not np.any(plan.starts[:num_tiles] % 8)  # interpreted kernels do not depend on it
    assert int(own.sum()) == 131072 and int(own.min()) > 0


def test_unsupported_arguments_are_refused_by_name():
    x, weights, sizes = jnp.zeros((8, 64)), jnp.zeros((1, 64, 64), jnp.bfloat16), jnp.array([8])
    message = "weights have dtype bfloat16 and x float32"
    with pallas_kernels.interpreted("gpu"), pytest.raises(NotImplementedError, match=message):
        grouped_matmul(x, weights, sizes, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="it runs on gpu"):
        grouped_matmul(x, weights, sizes, implementation="mosaic_gpu")
