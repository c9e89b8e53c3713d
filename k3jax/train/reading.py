"""Does the model look at the picture? Its text with the right picture and with another one.

    bits = -(1 / N) sum log2 p(byte of the text | picture, bytes before it)

over words that were never shown in training. The swapped picture is that of the next pair with
another text: a model that does not look has the same bits for both.
"""

import dataclasses

import jax
import numpy as np

from k3jax.data.bytes import decode
from k3jax.data.loader import join_pictures
from k3jax.data.packing import document_order
from k3jax.data.picture_rows import PictureRows
from k3jax.data.pictures import Pair


@dataclasses.dataclass(frozen=True)
class ReadingResult:
    """Bits per byte of the texts, and what the model takes the first pictures for.

    A guess is made character by character from the picture and the true characters before it.
    """

    right: float
    swapped: float
    num_bytes: int
    examples: list[tuple[Pair, str]]


def reading_record(reading: ReadingResult | None) -> dict:
    """What metrics.jsonl says of a measurement."""
    if reading is None:
        return {}
    return {
        "picture_bits_per_byte": reading.right,
        "swapped_picture_bits_per_byte": reading.swapped,
        "picture_bytes": reading.num_bytes,
    }


def reading_text(reading: ReadingResult | None) -> str:
    """The same, as the end of a line."""
    if reading is None:
        return ""
    return f"; words in pictures {reading.right:.3f}, with a swapped picture {reading.swapped:.3f}"


class HeldOutPictures:
    """Held-out rows of pictures, measured in a fixed order.

    Args:
        rows: the rows.
        batch: rows per call (the last batch is filled with padding rows).
    """

    def __init__(self, rows: PictureRows, batch: int):
        self.rows, self.batch = rows, batch
        self.order = document_order([str(i) for i in range(len(rows))], seed=0)

    def evaluate(self, step, num_bytes: int) -> ReadingResult:
        """Measure about `num_bytes` tokens; 0 takes all rows.

        Args:
            step: function of complete host arrays `tokens`, `segment_ids`, `media`, `answers`
                (`make_reading_step` with parameters).
            num_bytes: size of the sample.
        """
        count = -(-num_bytes // self.rows.length) if num_bytes else len(self.order)
        chosen = self.order[: max(1, count)]
        pending = []
        for at in range(0, len(chosen), self.batch):
            numbers = chosen[at : at + self.batch]
            picked = [self.rows[i] for i in numbers]
            swapped = [
                row | {"patches": self._swapped(i)} for i, row in zip(numbers, picked, strict=True)
            ]
            for swap, shown in ((False, picked), (True, swapped)):
                pending.append((swap, step(**self._inputs(shown))))
        nats, targets = {False: 0.0, True: 0.0}, {False: 0, True: 0}
        measured = jax.device_get(pending)
        for swap, part in measured:
            nats[swap] += float(part["nats"])
            targets[swap] += int(part["targets"])
        bits = {swap: nats[swap] / np.log(2) / targets[swap] for swap in nats}
        examples = self._examples(chosen[0], measured[0][1]["guesses"][0])
        return ReadingResult(bits[False], bits[True], targets[False], examples)

    def _examples(self, row: int, guesses: np.ndarray) -> list[tuple[Pair, str]]:
        """The pairs of a row with the guesses [T-1] of each of its next tokens."""
        source = self.rows[row]
        examples = []
        for number, index in enumerate(self.rows.plan[row], start=1):
            here = source["answers"] & (source["segment_ids"] == number)
            examples.append((self.rows.pairs[index], decode(guesses[here[1:]])))
        return examples

    def _swapped(self, row: int) -> np.ndarray:
        """The patches of a row with each picture replaced by that of another word."""
        pairs = self.rows.pairs
        images = []
        for index in self.rows.plan[row]:
            others = ((index + step) % len(pairs) for step in range(1, len(pairs)))
            other = next((i for i in others if pairs[i].text != pairs[index].text), index)
            images.append(pairs[other].image)
        return self.rows.process(images).patches

    def _inputs(self, picked: list[dict]) -> dict:
        shape = (self.batch, self.rows.length)
        arrays = [np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.bool_)]
        for array, name in zip(arrays, ("tokens", "segment_ids", "answers"), strict=True):
            for row, source in enumerate(picked):
                array[row] = source[name]
        items = self.batch * self.rows.most_pictures
        media = join_pictures(
            picked, items * self.rows.patches_per_picture, items, self.rows.patch_size
        )
        tokens, segment_ids, answers = arrays
        return {
            "tokens": tokens,
            "segment_ids": segment_ids,
            "media": media,
            "answers": answers,
        }
