"""One placeholder per item in a prompt becomes one per feature (on the host)."""

from typing import Literal, NamedTuple

import numpy as np

from k3jax.errors import UserError, describe
from k3jax.media.buckets import round_up
from k3jax.media.container import Media

IGNORED = -100  # label of a position that is no target

PadSide = Literal["left", "right"]


class Grown(NamedTuple):
    """Tokens with a placeholder for every feature, and what goes with them, [B, T'] int32."""

    tokens: np.ndarray
    segment_ids: np.ndarray  # 0 where a shorter row was padded
    labels: np.ndarray | None  # None when none were given


def count_features(media_or_grids: Media | np.ndarray) -> np.ndarray:
    """Features of each item, rows // 2 * columns // 2; rows of zeros at the end are no items."""
    is_media = isinstance(media_or_grids, Media)
    grids = np.asarray(media_or_grids.grids if is_media else media_or_grids)
    if grids.ndim != 2 or grids.shape[1] != 3:
        raise UserError(f"grids are {grids.shape}; expected [N, 3] (frames, rows, columns)")
    grids = grids[grids.any(axis=1)].astype(np.int64)
    return (grids[:, 1] // 2) * (grids[:, 2] // 2)


def grow_placeholders(
    tokens,
    media_or_grids: Media | np.ndarray,
    *,
    placeholder_id: int,
    segment_ids=None,
    labels=None,
    pad_side: PadSide = "left",
    pad_id: int = 0,
    length: int | None = None,
    bucketed: bool = False,
) -> Grown:
    """Repeat each placeholder as often as its item has features; other tokens stay as they are.

    The k-th placeholder, in row-major order over the batch, stands for item k.

    Args:
        tokens: ids [B, T] (or [T], one row), one placeholder per item.
        media_or_grids: `Media`, or grids [N, 3] of the items in order.
        placeholder_id: `cfg.media_placeholder_id`.
        segment_ids: [B, T]; a feature belongs to the segment of its placeholder. None: all real.
        labels: [B, T]; -100 (ignored) at the positions of features and of padding.
        pad_side: where rows shorter than the longest are padded, with segment 0.
        pad_id: the token there.
        length: T', at least the length of the longest grown row, which is the default.
        bucketed: T' is the next length of the ladder of `k3jax.media.buckets` instead.

    Returns:
        `Grown`, with the rank of `tokens`.

    Raises:
        UserError: placeholders and items differ in number, shapes differ, or a row exceeds
            `length`.
    """
    tokens = np.asarray(tokens)
    is_row = tokens.ndim == 1
    tokens = np.atleast_2d(tokens)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(f"tokens must be integers [B, T], got {tokens.dtype} {tokens.shape}")
    if pad_side not in ("left", "right"):
        raise UserError(f"pad_side={describe(pad_side)} must be 'left' or 'right'")
    segment_ids = _beside(np.ones_like(tokens) if segment_ids is None else segment_ids, tokens)
    labels = None if labels is None else _beside(labels, tokens)
    features = count_features(media_or_grids)
    is_media = tokens == placeholder_id
    if is_media.sum() != len(features):
        raise UserError(
            f"tokens hold {is_media.sum()} placeholders (id {placeholder_id}), but media holds "
            f"{len(features)} items; write exactly one placeholder per item"
        )
    repeats = np.ones(tokens.shape, np.int64)
    repeats[is_media] = features  # boolean indexing runs in row-major order
    lengths = repeats.sum(axis=1)
    longest = int(lengths.max(initial=0))
    if length is None:
        length = round_up(longest) if bucketed else longest
    elif longest > length:
        raise UserError(f"row {lengths.argmax()} grows to {longest} tokens, above length={length}")

    def grown(values: np.ndarray, padding: int) -> np.ndarray:
        result = np.full((len(tokens), length), padding, np.int32)
        for row, own in enumerate(values):
            start = length - lengths[row] if pad_side == "left" else 0
            result[row, start : start + lengths[row]] = np.repeat(own, repeats[row])
        return result[0] if is_row else result

    if labels is not None:
        labels = grown(np.where(is_media, IGNORED, labels), IGNORED)
    return Grown(grown(tokens, pad_id), grown(segment_ids, 0), labels)


def _beside(values, tokens: np.ndarray) -> np.ndarray:
    values = np.atleast_2d(np.asarray(values))
    if values.shape != tokens.shape:
        raise UserError(f"shape {values.shape} differs from that of the tokens, {tokens.shape}")
    return values
