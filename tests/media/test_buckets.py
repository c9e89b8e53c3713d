"""The ladder of static shapes: bounded waste, bounded number of programs."""

import numpy as np
import pytest

from k3jax.errors import UserError
from k3jax.media.buckets import (
    bucket_media,
    count_programs,
    item_buckets,
    patch_buckets,
    round_up,
)


def test_every_count_is_padded_by_less_than_a_quarter():
    for count in range(16, 5000):
        rung = round_up(count)
        assert count <= rung < 1.25 * count
        assert rung % 4 == 0
        assert round_up(rung) == rung
    assert [round_up(n) for n in (0, 1, 16, 17, 129)] == [16, 16, 16, 20, 160]


def test_ladder_lists_every_bucket_once():
    assert patch_buckets(80) == (16, 20, 24, 28, 32, 40, 48, 56, 64, 80)
    assert set(patch_buckets(5000)) == {round_up(n) for n in range(5001)}
    assert item_buckets(5) == (1, 2, 4, 8)
    assert len(patch_buckets(65536)) == 49
    assert count_programs(65536, 64) == 49 * 7


def test_media_is_padded_with_zeros_behind_its_items():
    grids, sizes = [[1, 2, 2], [2, 4, 2], [1, 2, 4]], [[28, 28], [20, 56], [50, 27]]
    patches = np.ones((28, 3, 2, 2))
    media = bucket_media(patches, grids, sizes)
    assert media.patches.shape == (28, 3, 2, 2) and media.patches.dtype == np.float32
    np.testing.assert_array_equal(media.grids, [*grids, [0, 0, 0]])
    np.testing.assert_array_equal(media.sizes, [*sizes, [0, 0]])
    assert media.num_features.tolist() == [1, 2, 2, 0]
    shorter = bucket_media(patches[:20], grids[:2], sizes[:2])
    assert shorter.patches.shape[0] == 20 and shorter.grids.shape == (2, 3)
    longer = bucket_media(np.ones((36, 3, 2, 2)), [[1, 6, 6]], [[84, 84]])
    assert longer.patches.shape[0] == 40
    assert longer.patches[:36].all() and not longer.patches[36:].any()
    empty = bucket_media(np.ones((0, 3, 2, 2)), np.zeros((0, 3), int), np.zeros((0, 2), int))
    assert empty.patches.shape[0] == 16 and empty.grids.tolist() == [[0, 0, 0]]


def test_parts_that_disagree_are_refused():
    with pytest.raises(UserError, match=r"patches \(3, 3, 2, 2\) must be \[4, 3, P, P\]"):
        bucket_media(np.ones((3, 3, 2, 2)), [[1, 2, 2]], [[28, 28]])
    with pytest.raises(UserError, match=r"grids \(1, 3\) and sizes \(2, 2\)"):
        bucket_media(np.ones((4, 3, 2, 2)), [[1, 2, 2]], [[28, 28]] * 2)
