"""The Hopper kernels of grouped products, interpreted, against the definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import SituGLU, grouped_glu, grouped_matmul
from pallas_kernels.grouped_matmul.mosaic_gpu_matrices import MatrixTiles
from pallas_kernels.grouped_matmul.mosaic_gpu_plan import plan_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import RowTiles
from pallas_kernels.tiles import with_tiles
from tests.kernels.errors import assert_within
from tests.pallas_kernels.compare import normal, values_and_gradients

ACTIVATION = SituGLU(4.0, 25.0)

# Few blocks and small tiles: more of what differs between tiles happens on few rows.
TILES = {
    "grouped_rows_gpu": RowTiles(columns=128, stages=2, blocks=2),
    "grouped_few_rows_gpu": RowTiles(rows=64, columns=128, stages=3, blocks=2),
    "grouped_matrices_gpu": MatrixTiles(columns=64, stages=2, blocks=2),
}


def compare(op, x, weights, sizes, dtype="bfloat16", mode="gpu", width=None):
    """Values and all gradients of op(implementation, x, *weights) against float64.

    Rows of x and of the cotangent that belong to no group are NaN for the kernels.
    """
    total = sum(sizes)
    operands = [jnp.asarray(operand, dtype) for operand in (x, *weights)]
    cotangent = jnp.asarray(normal(100, x.shape[0], width or weights[0].shape[2]), dtype)
    is_past = np.arange(x.shape[0])[:, None] >= total
    poisoned = [jnp.where(is_past, jnp.nan, operands[0]), *operands[1:]]
    with pallas_kernels.interpreted(mode), with_tiles(**TILES):
        (output,), gradients = values_and_gradients(
            lambda *operands: op("mosaic_gpu", *operands),
            poisoned,
            [jnp.where(is_past, jnp.nan, cotangent)],
        )
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(array, np.float64)) for array in (*operands, cotangent)]
        (exact_output,), exact_gradients = values_and_gradients(
            lambda *operands: op("reference", *operands), exact[:-1], exact[-1:]
        )
    assert output.dtype == dtype and not np.any(output[total:])
    assert not np.any(gradients[0][total:])
    assert_within(output, exact_output, dtype, "output")
    for name, actual, expected in zip("x w1 w2".split(), gradients, exact_gradients, strict=False):
        assert_within(actual, expected, dtype, f"gradient of {name}")


def product(sizes):
    return lambda implementation, x, weights: grouped_matmul(
        x, weights, jnp.array(sizes), implementation=implementation
    )


def gated(sizes):
    return lambda implementation, x, gate, up: grouped_glu(
        x, gate, up, jnp.array(sizes), activation=ACTIVATION, implementation=implementation
    )


def test_product_and_gradients_match_definition():
    sizes = (130, 0, 7, 20)
    compare(product(sizes), normal(0, 173, 72), [normal(1, 4, 72, 136)], sizes)


def test_gated_product_and_gradients_match_definition():
    sizes = (0, 140, 9)
    compare(gated(sizes), normal(0, 150, 40), [normal(n, 3, 40, 72) / 6 for n in (1, 2)], sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(0, 0), (1,), (63, 1, 64, 65), (64, 128), (300, 5, 0), (2, 3, 4, 5)], ids=str
)
def test_group_sizes_match_definition(sizes):
    rows = max(sum(sizes), 1) + (0 if sizes == (64, 128) else 3)
    compare(product(sizes), normal(0, rows, 64), [normal(1, len(sizes), 64, 64)], sizes)


@pytest.mark.slow
def test_float32_matches_definition():
    sizes = (30, 0, 40)
    weights = normal(1, 3, 70, 40), normal(2, 3, 70, 40)
    compare(product(sizes), normal(0, 80, 70), weights[:1], sizes, "float32")
    compare(gated(sizes), normal(0, 80, 70) / 8, weights, sizes, "float32")


@pytest.mark.slow
def test_kernels_have_no_races():
    sizes = (130, 0, 7, 20)
    compare(product(sizes), normal(0, 173, 64), [normal(1, 4, 64, 64)], sizes, mode="gpu_races")


def test_plan_multiplies_few_rows_more_than_there_are():
    """Skewed groups of a rank of 64: 28 of 896 experts, 131072 rows."""
    share = 1 / np.arange(2, 30)
    ends = np.round(np.cumsum(share) / share.sum() * 131072)
    plan = plan_rows(jnp.asarray(np.diff(ends, prepend=0), jnp.int32), 131072, 128)
    num_tiles = int(plan.num_tiles[0])
    assert (np.asarray(plan.groups[:num_tiles]) < 28).all()
    assert num_tiles * 128 <= 1.05 * 131072
    own = plan.lasts[:num_tiles] - plan.firsts[:num_tiles]
    assert int(own.sum()) == 131072 and int(own.min()) > 0


def test_unsupported_arguments_are_refused_by_name():
    x, weights, sizes = jnp.zeros((8, 64)), jnp.zeros((1, 64, 64), jnp.bfloat16), jnp.array([8])
    with pallas_kernels.interpreted("gpu"):
        with pytest.raises(NotImplementedError, match="weights have dtype bfloat16 and x float32"):
            grouped_matmul(x, weights, sizes, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="it runs on gpu"):
        grouped_matmul(x, weights, sizes, implementation="mosaic_gpu")
