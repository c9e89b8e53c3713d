"""The TPU kernels of grouped products, interpreted, against the definition in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernel_cases.grouped_matmul import CASES
from pallas_kernels import MXFP4, grouped_matmul, interpreted, quantize_mxfp8
from pallas_kernels.grouped_matmul.mosaic_tpu_matrices import MatrixTiles
from pallas_kernels.grouped_matmul.mosaic_tpu_rows import RowTiles
from pallas_kernels.grouped_matmul.mosaic_tpu_visits import matrix_visits, num_steps, row_visits
from pallas_kernels.mxfp4.reference import decode_table
from pallas_kernels.tiles import with_tiles
from pallas_kernels.traffic import count_traffic
from tests.kernels.grouped_cases import assert_as_definition, gated, matrices, product
from tests.pallas_kernels.compare import normal

# Several tiles, parts of a tile, blocks of columns and chunks of a block on few rows.
SMALL = {
    "grouped_rows_tpu": RowTiles(rows=64, part=32, columns=128, weight_bytes=1 << 18),
    "grouped_decode_tpu": RowTiles(rows=64, part=32, columns=128, weight_bytes=1 << 18),
    "grouped_matrices_tpu": MatrixTiles(rows=64, part=32, height=128, block=128, sum_bytes=1 << 16),
}
ROWS = 150
SIZES = {
    "empty ones between": (0, 33, 0, 1, 70, 0, 40, 0),
    "one with everything": (150, 0),
    "none": (0, 0, 0),
    "whole tiles": (64, 0, 64),
    "one after another in a tile": (1, 2, 3, 4, 5, 6, 7, 8),
}


def check(op, rows, sizes, operands, dtype="float32", mode="tpu"):
    with interpreted(mode), with_tiles(**SMALL):
        assert_as_definition(op(sizes), rows, sizes, operands, "mosaic_tpu", dtype)


def packed(seed, sizes, width, columns):
    """Matrices whose scales differ from group to group."""
    powers = np.exp2(np.random.default_rng(seed).integers(-3, 3, (len(sizes), width, columns)))
    return MXFP4.quantize(matrices(seed, sizes, width, columns) * powers)


def test_products_and_gradients_are_right():
    sizes = SIZES["empty ones between"]
    check(product, normal(0, ROWS, 256), sizes, [matrices(1, sizes, 256, 384)])


def test_gated_products_and_gradients_are_right():
    sizes = (0, 33, 1, 60)
    weights = [matrices(n, sizes, 128, 256, "bfloat16") for n in (1, 2)]
    check(gated, normal(0, 100, 128), sizes, weights, "bfloat16")


def test_packed_products_of_few_rows_are_right():
    sizes = (0, 2, 0, 20)
    check(product, normal(0, 40, 512), sizes, [packed(1, sizes, 512, 128)], "bfloat16")


def test_packed_products_with_quantised_rows_are_right():
    sizes = (33, 0, 60)
    rows = quantize_mxfp8(jnp.asarray(normal(0, 100, 256), jnp.bfloat16))
    check(product, rows, sizes, [packed(1, sizes, 256, 128)], "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", [product, gated])
def test_all_kinds_of_groups_are_right(op, dtype, case):
    sizes = SIZES[case]
    weights = [matrices(n, sizes, 128, 128, dtype) for n in range(1, 2 + (op is gated))]
    check(op, normal(0, ROWS, 128), sizes, weights, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tpu_poisoned", "tpu_races"])
@pytest.mark.parametrize("num_rows", [40, 130])
@pytest.mark.parametrize("form", ["plain", "packed", "quantised"])
def test_no_uninitialised_memory_is_read_and_cores_do_not_race(form, num_rows, mode):
    sizes = (0, 20, 1, 15)
    rows = jnp.asarray(normal(0, num_rows, 256), jnp.bfloat16)
    if form == "plain":
        weights = [matrices(n, sizes, 256, 256, "bfloat16") for n in (1, 2)]
    else:
        weights = [packed(n, sizes, 256, 256) for n in (1, 2)]
    check(
        gated,
        quantize_mxfp8(rows) if form == "quantised" else rows,
        sizes,
        weights,
        "bfloat16",
        mode,
    )


def test_codes_and_scales_decode_as_defined():
    """Every code under scales at and between the ends, by products with unit vectors."""
    # Smallest normal weights, ordinary ones, largest finite ones, NaN.
    scales = np.resize(np.array([2, 126, 127, 128, 252, 255], np.uint8), 128)
    codes = np.tile(np.arange(16, dtype=np.uint8), (128, 16))
    # The examples of the order of the halves, and of scales that are exponents, not numbers.
    examples = {125: (0x21, 127, (0.5, 1)), 126: (0xF9, 126, (-0.25, -3)),
                127: (0x7A, 128, (-2, 12))}  # fmt: skip
    for column, (byte, scale, _) in examples.items():
        codes[column, 0::2], codes[column, 1::2], scales[column] = byte & 15, byte >> 4, scale
    packed = MXFP4(
        jnp.asarray((codes[:, 0::2] | codes[:, 1::2] << 4)[None]),
        jnp.asarray(np.repeat(scales[None, :, None], 8, axis=2)),
    )
    unit = jnp.eye(256, dtype=jnp.bfloat16)[:64]
    with interpreted("tpu"), with_tiles(**SMALL):
        found = grouped_matmul(unit, packed, np.array([64]), implementation="mosaic_tpu")
    found = np.asarray(found, np.float64)
    np.testing.assert_array_equal(found, decode_table("float64")[scales[:, None], codes][:, :64].T)
    assert np.isnan(found[:, 5]).all()
    for column, (_, _, expected) in examples.items():
        assert found[:2, column].tolist() == list(expected)


# 14 own experts and up to 14 fetched ones of a rank that always has 8192 x 16 rows.
K3_ROWS, K3_GROUPS = 131072, 28


def skewed_sizes():
    """Random shares of many kinds, and ends of groups in the worst places."""
    random = np.random.default_rng(0)
    for concentration in (0.02, 0.1, 0.3, 1.0, 10.0, 1000.0):
        for _ in range(5):
            share = random.dirichlet(np.full(K3_GROUPS, concentration))
            yield np.diff(np.round(np.cumsum(share) * K3_ROWS), prepend=0).astype(np.int32)
    for size in (1, 127, 129, 255, 257, 511, 513, 4681):  # all equal, the last one with the rest
        sizes = np.full(K3_GROUPS, size, np.int32)
        sizes[-1] += K3_ROWS - sizes.sum()
        yield sizes
    yield np.r_[np.ones(K3_GROUPS - 1, np.int32), K3_ROWS - K3_GROUPS + 1].astype(np.int32)
    yield np.r_[K3_ROWS, np.zeros(K3_GROUPS - 1)].astype(np.int32)


def executed_rows(visits, tile_rows, part) -> int:
    """Rows that the kernels multiply: whole tiles, or the parts that hold rows of the group."""
    count = int(visits.counts[0])
    begins, ends = (np.asarray(a)[:count] for a in (visits.begins, visits.ends))
    is_full = (begins == 0) & (ends == tile_rows)
    parts = np.maximum(-(-ends // part) - begins // part, 0)
    return int(np.where(is_full, tile_rows, parts * part).sum())


def test_executed_operations_exceed_the_least_by_a_twentieth_at_most():
    plans = (
        (jax.jit(row_visits, static_argnums=(1, 2)), RowTiles()),
        (jax.jit(matrix_visits, static_argnums=(1, 2)), MatrixTiles()),
    )
    for sizes in skewed_sizes():
        assert sizes.sum() == K3_ROWS and sizes.min() >= 0
        for plan, tiles in plans:
            rows = executed_rows(plan(sizes, K3_ROWS, tiles.rows), tiles.rows, tiles.part)
            assert K3_ROWS <= rows <= 1.05 * K3_ROWS, sizes


@pytest.mark.parametrize("shape", [(5, 100, 16), (3, 64, 64), (8, 5, 32), (1, 7, 3)], ids=str)
def test_visits_cover_every_row_once(shape):
    num_groups, num_rows, tile_rows = shape
    random, plan = np.random.default_rng(0), jax.jit(row_visits, static_argnums=(1, 2))
    for total in (0, 1, num_rows // 2, num_rows - 1, num_rows, num_rows):
        sizes = random.multinomial(total, random.dirichlet(np.full(num_groups, 0.5)))
        visits = plan(jnp.asarray(sizes, jnp.int32), num_rows, tile_rows)
        groups, sources, targets, begins, ends, counts = map(np.asarray, visits)
        assert len(groups) == num_steps(num_rows, num_groups, tile_rows) >= counts[1]
        owner = np.full(num_rows, -1)
        for step in range(counts[0]):
            rows = targets[step] * tile_rows + np.arange(begins[step], ends[step])
            assert len(rows) and np.all(owner[rows] == -1) and sources[step] == targets[step]
            owner[rows] = groups[step]
        np.testing.assert_array_equal(owner[:total], np.repeat(np.arange(num_groups), sizes))
        assert np.all(owner[total:] == -1)
        first_zeros = targets[counts[0] : counts[1]] * tile_rows + begins[counts[0] : counts[1]]
        assert min(first_zeros, default=num_rows) == total
        # Matrices are used in order, so that each is read once, and tiles that nobody needs never.
        assert np.all(np.diff(groups) >= 0) and np.all(np.diff(targets) >= 0)
        assert sources.max() * tile_rows < max(total, 1)


QUICK = ("gate and up bf16 forward+backward", "down MXFP4 forward")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c.name in QUICK and c.size == "k3" else [pytest.mark.slow])
     for c in CASES],
    ids=lambda case: case.title,
)  # fmt: skip
def test_traffic_is_as_estimated_where_all_groups_hold_rows(case):
    *operands, sizes = case.specs()
    num_rows, num_groups = operands[0].shape[0], sizes.shape[0]
    sizes = np.bincount(np.arange(num_rows) % num_groups, minlength=num_groups).astype(np.int32)
    with interpreted("tpu"):
        calls = count_traffic(case.function("mosaic_tpu"), *operands, sizes)
    assert calls
    for call in calls:
        assert call.bytes == call.cost_estimate.bytes_accessed, call.name


def test_packed_matrices_are_read_in_less_than_a_third_of_the_bytes():
    width, columns = 3584, 3072

    def forward_and_gradient(num_groups):
        codes, scales = (
            jax.ShapeDtypeStruct((num_groups, columns, width // n), jnp.uint8) for n in (2, 32)
        )

        def run(codes, scales, x, d_output, sizes):
            product = lambda x: grouped_matmul(  # noqa: E731
                x, MXFP4(codes, scales), sizes, implementation="mosaic_tpu"
            )
            output, transpose = jax.vjp(product, x)
            return output, transpose(d_output)

        rows = [jax.ShapeDtypeStruct((8192, n), jnp.bfloat16) for n in (width, columns)]
        with interpreted("tpu"):
            return count_traffic(
                run, codes, scales, *rows, np.full(num_groups, 8192 // num_groups, np.int32)
            )

    for few, many in zip(forward_and_gradient(4), forward_and_gradient(8), strict=True):
        assert many.bytes - few.bytes <= 0.3 * (4 * width * columns * 2)


def test_few_rows_read_the_matrices_of_their_groups_only():
    case = next(case for case in CASES if case.name == "64 rows gate and up bf16 forward")
    *operands, sizes = case.specs()
    sizes = np.zeros(sizes.shape, np.int32)
    sizes[[3, 50, 111]] = (1, 40, 2)
    with interpreted("tpu"):
        (call,) = count_traffic(case.function("mosaic_tpu"), *operands, sizes)
    x, (gate, _), d_output = operands
    matrix = gate.shape[1] * gate.shape[2] * 2
    assert call.bytes == x.size * 2 + d_output.size * 2 + 3 * 2 * matrix


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 100), "float32", (2, 100, 128), "float32"), "K=100 must be a multiple of 128"),
        (((4, 128), "float32", (2, 128, 100), "float32"), "N=100 must be a multiple of 128"),
        (((4, 128), "float16", (2, 128, 128), "float16"), "x has dtype float16; float32 and"),
        (((4, 128), "bfloat16", (2, 128, 128), "float32"), "weights have dtype float32 and x"),
        (((0, 128), "float32", (2, 128, 128), "float32"), "x has no rows"),
    ],
)
def test_unsupported_arguments_are_named(arguments, message):
    x_shape, x_dtype, shape, dtype = arguments
    x, weights = jnp.zeros(x_shape, x_dtype), jnp.zeros(shape, dtype)
    run = functools.partial(grouped_matmul, x, weights, np.zeros(2, np.int32))
    with interpreted("tpu"), pytest.raises(NotImplementedError, match=message):
        run(implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match="it runs on tpu, and this program is for cpu"):
        run(implementation="mosaic_tpu")
