"""Refusal of media that the vision tower does not define, where their values are known."""

import jax
import numpy as np

from k3jax.config import VisionConfig
from k3jax.errors import UserError
from k3jax.media.container import Media

MAX_SIDE = 512  # patches along one side of an item: the reach of the rotary tables
SMALLEST_ITEM = 4  # patches: one token


def is_known(x) -> bool:
    """Whether the values of an array can be read here: not traced, and all on this process."""
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def check_media(media: Media, vision: VisionConfig | None) -> None:
    """Refuse what cannot be computed: shapes always, grids where they are known.

    Raises:
        UserError: the model has no vision tower; no array; patches of another size, or too few
            for any item; a side that is odd or above 512; more frames than the model knows; grids
            that disagree with the patches.
    """
    if vision is None:
        raise UserError(
            "media was given, but this model has no vision tower (cfg.vision is None); pass "
            "tokens only or use a model with vision"
        )
    if not isinstance(media, Media):
        raise UserError(f"media must be k3jax.media.Media, got {type(media).__name__}")
    for name in ("patches", "grids"):
        value = getattr(media, name)
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise UserError(
                f"media.{name} is a {type(value).__name__}; pass an array (np.asarray makes one)"
            )
    side = vision.patch_size
    if media.patches.ndim != 4 or media.patches.shape[1:] != (3, side, side):
        raise UserError(
            f"media.patches is {media.patches.shape}; this model reads [L, 3, {side}, {side}]"
        )
    if media.patches.shape[0] < SMALLEST_ITEM:
        raise UserError(
            f"media.patches is {media.patches.shape}, in which no item fits; for tokens without "
            "media leave media=None"
        )
    if media.grids.ndim != 2 or media.grids.shape[1] != 3 or media.grids.shape[0] < 1:
        raise UserError(f"media.grids is {media.grids.shape}; expected [N, 3], N at least 1")
    if not np.issubdtype(media.grids.dtype, np.integer):
        raise UserError(f"media.grids holds {media.grids.dtype}; expected integers")
    if is_known(media.grids):
        _check_grids(np.asarray(media.grids, np.int64), media.patches.shape[0], vision)


def _check_grids(grids: np.ndarray, num_patches: int, vision: VisionConfig) -> None:
    is_item = grids.any(axis=1)
    if not is_item[: is_item.sum()].all():
        raise UserError(f"grids {grids.tolist()}: rows of zeros must come after all items")
    for number, (frames, rows, columns) in enumerate(grids[is_item].tolist()):
        name = f"item {number} of media with grid (frames, rows, columns) = "
        name += f"({frames}, {rows}, {columns})"
        if not 1 <= frames <= vision.max_frames:
            raise UserError(f"{name}: frames must lie in 1..{vision.max_frames}")
        if rows % 2 or columns % 2 or min(rows, columns) < 2:
            raise UserError(f"{name}: rows and columns must be even, since 2x2 patches are merged")
        if max(rows, columns) > MAX_SIDE:
            raise UserError(f"{name}: rows and columns may not exceed {MAX_SIDE}")
    total = int(grids.prod(axis=1).sum())
    if total > num_patches:
        raise UserError(
            f"grids {grids[is_item].tolist()} need {total} patches; media.patches has {num_patches}"
        )
