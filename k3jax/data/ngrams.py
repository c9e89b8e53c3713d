"""Count baselines: what predicts the next byte from the 0, 1 or 2 before it.

    p1(c)    = (n(c) + 1) / (N + 256)
    p2(c|b)  = (n(bc) + w p1(c)) / (n(b) + w)
    p3(c|ab) = (n(abc) + w p2(c|b)) / (n(ab) + w),   w = 3

Counted on all training bytes. A document starts after two begin marks, so its first bytes are
predicted too; document ends are not targets. Contexts reach across row cuts: the counts see at
least as much of their context as the model does.
"""

import dataclasses

import numpy as np

from k3jax.data.bytes import BEGIN_OF_DOCUMENT, NUM_BYTES
from k3jax.data.corpus import Documents

BACKOFF_WEIGHT = 3.0
SYMBOLS = NUM_BYTES + 1  # bytes and the begin mark
BLOCK = 1 << 24  # positions counted at once


def _contexts(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """The byte before and the one before that, at every position: int32 [bytes] each."""
    before = np.full(documents.num_bytes, BEGIN_OF_DOCUMENT, np.int32)
    before_that = before.copy()
    before[1:] = documents.text[:-1]
    before_that[2:] = documents.text[:-2]
    starts = documents.starts[:-1]
    before[starts] = BEGIN_OF_DOCUMENT
    before_that[starts] = BEGIN_OF_DOCUMENT
    longer = np.diff(documents.starts) > 1
    before_that[starts[longer] + 1] = BEGIN_OF_DOCUMENT
    return before, before_that


@dataclasses.dataclass(frozen=True)
class NGrams:
    """Counts over training documents."""

    ones: np.ndarray  # [256]
    twos: np.ndarray  # [257, 256]
    threes: np.ndarray  # [257 * 257, 256], int32

    @classmethod
    def count(cls, documents: Documents) -> "NGrams":
        """Count every byte of `documents` once."""
        before, before_that = _contexts(documents)
        threes = np.zeros(SYMBOLS * SYMBOLS * NUM_BYTES, np.int32)
        for at in range(0, documents.num_bytes, BLOCK):
            part = slice(at, at + BLOCK)
            code = (before_that[part] * SYMBOLS + before[part]) * NUM_BYTES + documents.text[part]
            threes += np.bincount(code, minlength=len(threes)).astype(np.int32)
        threes = threes.reshape(SYMBOLS, SYMBOLS, NUM_BYTES)
        twos = threes.sum(0, dtype=np.int64)
        return cls(ones=twos.sum(0), twos=twos, threes=threes.reshape(-1, NUM_BYTES))

    def bits(self, documents: Documents) -> dict[str, np.ndarray]:
        """-log2 p of each byte: {"unigram", "bigram", "trigram"} -> float64 [bytes]."""
        before, before_that = _contexts(documents)
        text = documents.text
        weight = BACKOFF_WEIGHT
        one = ((self.ones + 1) / (self.ones.sum() + NUM_BYTES))[text]
        two = (self.twos[before, text] + weight * one) / (self.twos.sum(1)[before] + weight)
        context = before_that * SYMBOLS + before
        three = (self.threes[context, text] + weight * two) / (
            self.threes.sum(1, dtype=np.int64)[context] + weight
        )
        named = {"unigram": one, "bigram": two, "trigram": three}
        return {name: -np.log2(probability) for name, probability in named.items()}
