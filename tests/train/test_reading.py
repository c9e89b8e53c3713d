"""The measurement of reading: the swapped picture is another word's."""

import numpy as np
import pytest

from k3jax.data.picture_rows import PictureRows
from k3jax.data.pictures import TextPictures
from k3jax.train.reading import HeldOutPictures

WORDS = ["alpha", "beta", "gamma", "delta", "zeta"]


@pytest.mark.parametrize("length", [32, 80, 200])  # one, two and all pairs in a row
def test_every_picture_is_swapped_for_one_of_another_word(length):
    rows = PictureRows(TextPictures(WORDS), length=length, patch_size=14)
    shown = []

    def step(tokens, segment_ids, media, answers):
        shown.append(np.asarray(media.patches))
        bits = float(answers.sum())
        return {"nats": bits, "targets": answers.sum(), "guesses": np.zeros_like(tokens)[:, 1:]}

    result = HeldOutPictures(rows, batch=2).evaluate(step, 0)
    assert result.num_bytes == sum(map(len, WORDS))
    per_picture = rows.patches_per_picture
    for right, swapped in zip(shown[::2], shown[1::2], strict=True):
        for at in range(0, len(right), per_picture):
            picture = right[at : at + per_picture]
            if picture.any():
                assert not np.array_equal(picture, swapped[at : at + per_picture])
