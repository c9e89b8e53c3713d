"""A small model that sees, and media for it."""

import dataclasses

import numpy as np

from k3jax.config import K3Config, VisionConfig
from k3jax.media import Media
from tests.small_configs import two_layers

PLACEHOLDER = 37
# Shapes of every kind: the smallest, longer than high, a video, the size of the position grid.
GRIDS = np.array([[1, 2, 2], [1, 2, 14], [4, 4, 2], [1, 6, 4], [2, 10, 6]], np.int32)


def seeing(text: K3Config | None = None, **changes) -> K3Config:
    """`two_layers` (or another text model) with a small tower; `changes` are fields of it."""
    fields = {
        "dim": 12,
        "num_layers": 2,
        "num_heads": 2,
        "qkv_dim": 16,
        "ffn_dim": 14,
        "patch_size": 2,
        "merge_size": (2, 2),
        "position_rows": 6,
        "position_columns": 4,
        "max_frames": 4,
        "projector_dim": 12,
        "projector_norm_eps": 1e-5,
    }
    vision = VisionConfig(**(fields | changes))
    return dataclasses.replace(
        text or two_layers(), vision=vision, media_placeholder_id=PLACEHOLDER
    )


def random_media(
    cfg: K3Config, grids=GRIDS, *, num_patches: int | None = None, items: int | None = None, seed=0
) -> Media:
    """Uniform patches in [-1, 1], padded with zeros to the given capacities."""
    grids = np.asarray(grids, np.int32)
    count, side = int(grids.prod(1).sum()), cfg.vision.patch_size
    num_patches, items = num_patches or count, items or len(grids)
    patches = np.random.default_rng(seed).uniform(-1, 1, (count, 3, side, side))
    return Media(
        patches=np.pad(patches.astype(np.float32), [(0, num_patches - count)] + [(0, 0)] * 3),
        grids=np.pad(grids, [(0, items - len(grids)), (0, 0)]),
        sizes=np.ones((items, 2), np.int32),
    )


def take_item(media: Media, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Patches and grid [1, 3] of one item."""
    ends = np.cumsum(media.grids.prod(1))
    start = ends[number] - media.grids[number].prod()
    return media.patches[start : ends[number]], media.grids[number : number + 1]
