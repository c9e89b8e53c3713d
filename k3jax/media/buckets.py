"""Static shapes for pictures of any size: a short ladder, so that few programs are compiled.

A program depends on the patches L and the items N of its `Media` alone. L climbs a ladder of four
steps per doubling (16, 20, 24, 28, 32, 40, 48, ...), so less than a quarter of the patches is
padding; N is a power of two, whose padding costs nothing. Up to 65,536 patches (one picture at the
released limit) there are 49 values of L.
"""

import numpy as np

from k3jax.errors import UserError
from k3jax.media.container import Media

SMALLEST_PATCHES = 16


def round_up(count: int, smallest: int = SMALLEST_PATCHES) -> int:
    """The step of the ladder at or above `count`: m * 2^k with m in 4..7, at least `smallest`."""
    count = max(count, smallest)
    step = 1 << max((count - 1).bit_length() - 3, 0)
    return -(-count // step) * step


def patch_buckets(limit: int) -> tuple[int, ...]:
    """Every L that media of at most `limit` patches can have."""
    return tuple(_climb(round_up, limit))


def item_buckets(limit: int) -> tuple[int, ...]:
    """Every N that media of at most `limit` items can have."""
    return tuple(_climb(_next_power, limit))


def count_programs(max_patches: int, max_items: int) -> int:
    """Bound on the programs compiled for one function and one text shape."""
    return len(patch_buckets(max_patches)) * len(item_buckets(max_items))


def bucket_media(patches: np.ndarray, grids: np.ndarray, sizes: np.ndarray) -> Media:
    """Items of their true number and size as `Media` of bucketed shapes, in host memory.

    Args:
        patches: [sum of frames * rows * columns, 3, P, P] float, items back to back.
        grids: [number of items, 3] integers (frames, rows, columns).
        sizes: [number of items, 2] integers (width, height) before resizing.

    Raises:
        UserError: the three disagree about the number of items or patches.
    """
    patches, grids, sizes = np.asarray(patches), np.asarray(grids), np.asarray(sizes)
    if grids.ndim != 2 or grids.shape[1] != 3 or sizes.shape != (len(grids), 2):
        raise UserError(f"grids {grids.shape} and sizes {sizes.shape} must be [N, 3] and [N, 2]")
    expected = int(grids.astype(np.int64).prod(axis=1).sum())
    if patches.ndim != 4 or len(patches) != expected:
        raise UserError(
            f"patches {patches.shape} must be [{expected}, 3, P, P], one per place of the grids "
            f"{grids.tolist()}"
        )
    num_patches, num_items = round_up(len(patches)), _next_power(len(grids))

    def padded(array: np.ndarray, length: int, dtype) -> np.ndarray:
        result = np.zeros((length, *array.shape[1:]), dtype)
        result[: len(array)] = array
        return result

    return Media(
        patches=padded(patches, num_patches, np.float32),
        grids=padded(grids, num_items, np.int32),
        sizes=padded(sizes, num_items, np.int32),
    )


def _next_power(count: int) -> int:
    return 1 << (max(count, 1) - 1).bit_length()


def _climb(rung, limit: int):
    value = rung(1)
    yield value
    while value < limit:
        value = rung(value + 1)
        yield value
