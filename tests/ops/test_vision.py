"""Places of patches, resampling, rotary factors and pooling, against plain loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import ops
from tests.model.numpy_vision import resampling, rotations
from tests.small_configs import quick_jit, relative_error
from tests.tolerances import assert_close

GRIDS = np.array([[1, 2, 4], [3, 4, 2], [1, 6, 6], [0, 0, 0]], np.int32)
NUM_PATCHES = 72  # 68 are real


@pytest.fixture(scope="module")
def places():
    return ops.locate_patches(jnp.asarray(GRIDS), NUM_PATCHES)


def test_patches_know_their_item_frame_row_and_column(places):
    expected = [
        (number + 1, frame, row, column, *grid)
        for number, grid in enumerate(GRIDS.tolist())
        for frame, row, column in np.ndindex(*grid)
    ]
    found = np.stack(places, axis=1)
    np.testing.assert_array_equal(found[: len(expected)], expected)
    assert not places.segment_ids[len(expected) :].any()


def test_features_join_neighbours_over_frames():
    x = np.random.default_rng(0).standard_normal((NUM_PATCHES, 5)).astype(np.float32)
    found = ops.pool_frames(jnp.asarray(x), ops.locate_features(jnp.asarray(GRIDS), NUM_PATCHES), 4)
    expected, start = np.zeros((NUM_PATCHES // 4, 4, 5)), 0
    k = 0
    for frames, rows, columns in GRIDS.tolist():
        count = frames * rows * columns
        item = x[start : start + count].reshape(frames, rows, columns, 5).astype(np.float64)
        start += count
        for row, column in np.ndindex(rows // 2, columns // 2):
            square = item[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            expected[k] = square.mean(0).reshape(4, 5)
            k += 1
    assert_close(found, expected)


@pytest.mark.parametrize("grid", [(1, 6, 8), (1, 2, 2), (1, 22, 4), (2, 4, 26), (1, 512, 2)])
def test_position_grid_is_resampled_without_smoothing(grid):
    table = np.random.default_rng(1).standard_normal((6, 8, 3)).astype(np.float32)
    places = ops.locate_patches(jnp.asarray([grid], jnp.int32), int(np.prod(grid)))
    found = np.asarray(ops.position_embedding(jnp.asarray(table), places))
    frames, rows, columns = grid
    lines = resampling(rows, 6), table.astype(np.float64), resampling(columns, 8)
    expected = np.einsum("hr,rcd,wc->hwd", *lines).reshape(-1, 3)
    assert_close(found, np.tile(expected, (frames, 1)))
    if grid == (1, 6, 8):  # its own size: bit for bit
        np.testing.assert_array_equal(found, table.reshape(-1, 3))


def test_rotation_is_exact_at_the_largest_side():
    """Float32 angles would be off by 3e-5 there."""
    grid, heads, width = (1, 2, 512), 2, 16
    places = ops.locate_patches(jnp.asarray([grid], jnp.int32), 1024)
    x = np.random.default_rng(2).standard_normal((1024, heads, width)).astype(np.float32)
    found = ops.rotate_pairs(jnp.asarray(x), *ops.rotary_factors(places, width))
    turn = rotations(grid, width)[:, None]
    product = (x[..., 0::2] + 1j * x[..., 1::2].astype(np.float64)) * turn
    expected = np.stack([product.real, product.imag], -1).reshape(x.shape)
    assert relative_error(found, expected) <= 1e-7
    narrow = ops.rotate_pairs(jnp.asarray(x, jnp.bfloat16), *ops.rotary_factors(places, width))
    assert narrow.dtype == jnp.bfloat16


def test_only_videos_get_a_frame_vector(places):
    found = np.asarray(ops.frame_embedding(places, 6, 4))
    is_video = np.asarray(places.segment_ids) == 2
    assert not found[~is_video].any()
    first = found[is_video][:8]
    np.testing.assert_array_equal(first, np.tile([0, 0, 0, 1, 1, 1], (8, 1)))
    frequencies = 10000.0 ** (-np.arange(3) / 3)
    second = np.concatenate([np.sin(2 * frequencies), np.cos(2 * frequencies)])
    assert_close(found[is_video][-1], second)


@pytest.mark.parametrize(
    ("grid", "is_valid"),
    [
        ((1, 2, 2), True),
        ((4, 2, 8), True),
        ((0, 0, 0), True),
        ((5, 2, 2), False),
        ((0, 2, 2), False),
        ((1, 3, 2), False),
        ((1, 2, 0), False),
        ((1, -2, 2), False),
        ((1, 2, 514), False),
        ((4, 4, 6), False),
    ],
)
def test_grids_that_no_tower_defines_are_known(grid, is_valid):
    grids = jnp.asarray([(1, 2, 2), grid], jnp.int32)
    assert bool(ops.grids_are_valid(grids, 80, 4)) == is_valid


def test_gradients_of_gathers_are_those_of_the_loops(places):
    """Linear maps: <y, f(x)> and its gradient in x agree along any direction."""
    random = np.random.default_rng(4)
    features = ops.locate_features(jnp.asarray(GRIDS), NUM_PATCHES)
    for function, shape in (
        (lambda x: ops.pool_frames(x, features, 4), (NUM_PATCHES, 3)),
        (lambda table: ops.position_embedding(table, places), (3, 5, 2)),
    ):
        x, direction = random.standard_normal((2, *shape)).astype(np.float32)
        y = random.standard_normal(jax.eval_shape(function, x).shape).astype(np.float32)
        gradient = quick_jit(jax.grad(lambda x, f=function, y=y: (f(x) * y).sum()))(x)
        along = (np.asarray(function(jnp.asarray(direction)), np.float64) * y).sum()
        assert_close((np.asarray(gradient, np.float64) * direction).sum(), along, gradient=True)
