"""Pairs of picture and text packed into rows of T tokens.

A pair is one document, `[BOS] picture text [EOS]`, the picture written as in the chat format with
as many placeholders as it has features:

    <|media_begin|> image {W}x{H} <|media_content|> <|media_pad|>... <|media_end|>
"""

from collections.abc import Sequence

import numpy as np

from k3jax.data.bytes import (
    BEGIN_OF_DOCUMENT,
    END_OF_DOCUMENT,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    encode,
)
from k3jax.data.pictures import Pair
from k3jax.errors import UserError
from k3jax.media import Media, MediaConfig, process_media

MERGE = 4  # patches of a feature


def picture_ids(size: tuple[int, int], num_pads: int = 1) -> np.ndarray:
    """A picture of (width, height) pixels as ids, int32, with `num_pads` placeholders."""
    width, height = size
    name = encode(f"image {width}x{height}")
    parts = [[MEDIA_BEGIN], name, [MEDIA_CONTENT], [MEDIA_PAD] * num_pads, [MEDIA_END]]
    return np.concatenate(parts).astype(np.int32)


class PictureRows:
    """Random access source of rows.

    `rows[i]` -> {"tokens", "segment_ids" int32 [T]; "answers" bool [T], where a byte of a text
    stands; "patches" float32 [L, 3, P, P], "grids" int32 [N, 3], "sizes" int32 [N, 2] of its
    pictures}. A pair is never cut; the end of a row that the next pair does not fit is padding.

    Args:
        pairs: pictures of one size, with their texts.
        length: tokens per row, T.
        patch_size: pixels of a patch, P.

    Raises:
        UserError: rows shorter than a pair.
    """

    def __init__(self, pairs: Sequence[Pair], length: int, patch_size: int):
        self.pairs, self.length, self.patch_size = pairs, length, patch_size
        self._config = MediaConfig(patch_size=patch_size)
        self.patches_per_picture = self.process([pairs[0].image]).patches.shape[0]
        self.plan = self._plan()
        self.most_pictures = max(len(row) for row in self.plan)

    def _plan(self) -> list[list[int]]:
        rows, used = [[]], 0
        for index in range(len(self.pairs)):
            needed = len(self._document(self.pairs[index])[0])
            if needed > self.length:
                raise UserError(
                    f"length={self.length} is shorter than a picture with its text, {needed} "
                    "tokens; raise --length or set --data.pictures 0"
                )
            if used + needed > self.length:
                rows.append([])
                used = 0
            rows[-1].append(index)
            used += needed
        return rows

    def _document(self, pair: Pair) -> tuple[np.ndarray, int]:
        """Ids of one pair, and where its text begins."""
        picture = picture_ids(pair.image.size, self.patches_per_picture // MERGE)
        head = np.concatenate([[BEGIN_OF_DOCUMENT], picture])
        return np.concatenate([head, encode(pair.text), [END_OF_DOCUMENT]]), len(head)

    def process(self, images) -> Media:
        """Pictures as the rows hold them, without padding."""
        return process_media(images, config=self._config, buckets=False)

    def __len__(self) -> int:
        return len(self.plan)

    def __repr__(self) -> str:  # grain names sources in its messages
        return f"PictureRows(rows={len(self)}, length={self.length}, pairs={self.pairs!r})"

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.zeros(self.length, np.int32)
        segment_ids = np.zeros(self.length, np.int32)
        answers = np.zeros(self.length, np.bool_)
        pairs = [self.pairs[i] for i in self.plan[index]]
        at = 0
        for number, pair in enumerate(pairs, start=1):
            ids, begin = self._document(pair)
            tokens[at : at + len(ids)] = ids
            segment_ids[at : at + len(ids)] = number
            answers[at + begin : at + len(ids) - 1] = True
            at += len(ids)
        media = self.process([pair.image for pair in pairs])
        return {
            "tokens": tokens,
            "segment_ids": segment_ids,
            "answers": answers,
            "patches": media.patches,
            "grids": media.grids,
            "sizes": media.sizes,
        }
