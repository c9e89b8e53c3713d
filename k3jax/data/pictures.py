"""Pictures with the text that they show.

A word of the corpus is drawn in a monospaced font; the word is what the model has to write after
the picture. Reading needs no labels: every text is its own.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from k3jax.data.corpus import Corpus
from k3jax.errors import UserError

CELL = 28  # pixels of a character, and of one feature: 2x2 patches of 14
MAX_CHARACTERS = 8
SIZE = (MAX_CHARACTERS * CELL, CELL)  # (width, height) of every picture
FONT_SIZE = 24.0
BASELINE = 21  # rows from the top; descenders and underscores end above row 28

# Words of the scripts that the font draws: Latin with its accents, Greek, Cyrillic.
_LETTER = "A-Za-zÀ-ɏΆ-ϿЀ-ӿ"
_WORD = re.compile(rf"(?<!\w)[{_LETTER}_][{_LETTER}_0-9]{{2,{MAX_CHARACTERS - 1}}}(?!\w)")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A picture and the text to write about it."""

    image: Image.Image
    text: str


def split_words(corpus: Corpus, held_out_fraction: float) -> tuple[list[str], list[str]]:
    """Distinct words of 3 to 8 letters to show in training, and others for measuring.

    Order and split go by the SHA-256 of the word, so they depend on nothing else.

    Raises:
        UserError: the corpus has fewer than two such words.
    """
    found = {
        word
        for documents in (corpus.train, corpus.held_out)
        for index in range(len(documents.names))
        for word in _WORD.findall(documents.document(index).tobytes().decode(errors="replace"))
    }
    if len(found) < 2:
        raise UserError(
            f"{corpus.source} has {len(found)} words of 3 to {MAX_CHARACTERS} letters to draw "
            "(Latin, Greek, Cyrillic), and pictures need two; train on text alone with "
            "--data.pictures 0"
        )
    words = sorted(found, key=lambda word: hashlib.sha256(word.encode()).digest())
    cut = max(1, int(held_out_fraction * len(words)))
    return words[cut:], words[:cut]


class TextPictures(Sequence):
    """Words, drawn: `pictures[i]` -> Pair."""

    def __init__(self, words: Sequence[str]):
        self.words = words

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:  # grain names sources in its messages
        return f"TextPictures({len(self)})"

    def __getitem__(self, index: int) -> Pair:
        text = self.words[index]
        return Pair(draw(text), text)


def draw(text: str) -> Image.Image:
    """Up to 8 characters in a row, black on white, one per cell of 28x28 pixels."""
    image = Image.new("RGB", SIZE, "white")
    pen = ImageDraw.Draw(image)
    for i, character in enumerate(text[:MAX_CHARACTERS]):
        where = (i * CELL + CELL // 2, BASELINE)
        pen.text(where, character, fill="black", font=_font(), anchor="ms")
    return image


@functools.cache
def _font():
    import matplotlib  # its data folder holds the font

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSansMono.ttf")
    return ImageFont.truetype(str(path), FONT_SIZE)


class Digits(Sequence):
    """Handwritten digits of scikit-learn (8x8 pixels, enlarged to one cell) and their names.

    Args:
        held_out: the last tenth instead of the rest.

    Raises:
        UserError: scikit-learn is not installed.
    """

    def __init__(self, *, held_out: bool = False):
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UserError(
                "handwritten digits come with scikit-learn: pip install 'k3jax[digits]', "
                "or --data.digits 0"
            ) from error
        digits = load_digits()
        cut = len(digits.target) * 9 // 10
        own = slice(cut, None) if held_out else slice(cut)
        self.images, self.targets = digits.images[own], digits.target[own]

    def __len__(self) -> int:
        return len(self.targets)

    def __repr__(self) -> str:
        return f"Digits({len(self)})"

    def __getitem__(self, index: int) -> Pair:
        grey = (255 - self.images[index] * (255 / 16)).astype("uint8")
        small = Image.fromarray(grey).convert("RGB")
        return Pair(small.resize((CELL, CELL), Image.Resampling.BICUBIC), str(self.targets[index]))
