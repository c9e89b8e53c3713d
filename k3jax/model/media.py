"""Media at the door of a call: checks and placeholder growth where values are known."""

import jax
import numpy as np

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.media import Media, grow_placeholders
from k3jax.media.checks import check_media, is_known
from k3jax.media.grow import count_features


def enter_media(cfg: K3Config, tokens, segment_ids, media: Media | None, *, bucketed: bool = False):
    """Tokens and segment ids with as many placeholders as `media` has features.

    Tokens that are grown already come back as they are, as do values that are not known here
    (traced, or on other processes). Rows that become shorter than others are padded with segment
    0: on the right if any row ends in padding, else on the left.

    Args:
        cfg: the model.
        tokens: [B, T] int32.
        segment_ids: [B, T] int32 or None.
        media: None returns the other two untouched.
        bucketed: pad what grows to a length of the ladder (`k3jax.media.buckets`), so that
            pictures of many sizes share few programs.

    Raises:
        UserError: the media cannot be read by this model, or the number of placeholders is
            neither that of the items nor that of the features.
    """
    if media is None:
        return tokens, segment_ids
    check_media(media, cfg.vision)
    placeholder = cfg.media_placeholder_id
    if placeholder is None:
        raise UserError("media was given, but cfg.media_placeholder_id is None; set the token")
    if not all(map(is_known, (tokens, segment_ids, media.grids))):
        return tokens, segment_ids
    features = count_features(media)
    values = np.asarray(tokens)
    count = int((values == placeholder).sum())
    if count == features.sum():
        return tokens, segment_ids
    if count != len(features):
        raise UserError(
            f"tokens hold {count} placeholders (id {placeholder}), but media holds {len(features)} "
            f"items with {features.sum()} features; write one placeholder per item, or one per "
            "feature"
        )
    is_right = segment_ids is not None and not np.asarray(segment_ids)[:, -1].all()
    grown = grow_placeholders(
        values,
        media,
        placeholder_id=placeholder,
        segment_ids=segment_ids,
        pad_side="right" if is_right else "left",
        pad_id=cfg.pad_id or 0,
        bucketed=bucketed,
    )
    ids = None if segment_ids is None and grown.segment_ids.all() else grown.segment_ids
    return _like(grown.tokens, tokens), None if ids is None else _like(ids, tokens)


def _like(values: np.ndarray, original):
    """The values where the original array lies."""
    if isinstance(original, jax.Array):
        return jax.device_put(values, original.sharding)
    return values
