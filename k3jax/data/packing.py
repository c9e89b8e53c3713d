"""Documents cut into rows of T tokens, every byte a target exactly once.

A document is [BOS] bytes [EOS]. Documents follow one another; where a row ends inside one, the
rest continues in the next row as a new segment that repeats the last token as context, so no
target is lost at the cut. Segment ids count from 1 in each row; 0 marks the unfilled end.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from k3jax.data.bytes import BEGIN_OF_DOCUMENT, END_OF_DOCUMENT
from k3jax.data.corpus import Documents

MIN_PIECE = 2  # a context token and one target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens [start, stop) of a document, placed at `offset` of a row."""

    document: int
    start: int
    stop: int
    offset: int


def document_order(names: Sequence[str], seed: int) -> list[int]:
    """A permutation that depends on names and seed alone, not on a random generator's version."""
    keys = [hashlib.sha256(f"{seed}\0{name}".encode()).digest() for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


class PackedRows:
    """Random access source of rows: `rows[i]` -> {"tokens", "segment_ids"}, int32 [T] each.

    The plan is computed once, from documents, length and seed alone.

    Args:
        documents: what to pack.
        length: tokens per row, T.
        seed: order of the documents.
    """

    def __init__(self, documents: Documents, length: int, seed: int = 0):
        if length < MIN_PIECE:
            raise ValueError(f"length={length} must be at least {MIN_PIECE}")
        self.documents = documents
        self.length = length
        self.seed = seed
        self.plan = self._plan()

    def _plan(self) -> list[tuple[Piece, ...]]:
        rows, row, used = [], [], 0
        for document in document_order(self.documents.names, self.seed):
            total = int(self.documents.starts[document + 1] - self.documents.starts[document]) + 2
            start = 0
            while total - start >= MIN_PIECE:
                room = self.length - used
                if room < MIN_PIECE:
                    rows.append(tuple(row))
                    row, used = [], 0
                    continue
                stop = min(total, start + room)
                row.append(Piece(document=document, start=start, stop=stop, offset=used))
                used += stop - start
                start = stop - 1  # the last token again, as context of the continuation
        if row:
            rows.append(tuple(row))
        return rows

    def __len__(self) -> int:
        return len(self.plan)

    def __repr__(self) -> str:  # grain names sources in its messages
        return f"PackedRows(rows={len(self)}, length={self.length}, seed={self.seed})"

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.zeros(self.length, np.int32)
        segment_ids = np.zeros(self.length, np.int32)
        for number, piece in enumerate(self.plan[index], start=1):
            text = self.documents.document(piece.document)
            first, last = max(piece.start - 1, 0), min(piece.stop - 1, len(text))
            at = piece.offset
            if piece.start == 0:
                tokens[at] = BEGIN_OF_DOCUMENT
                at += 1
            tokens[at : at + last - first] = text[first:last]
            if piece.stop == len(text) + 2:
                tokens[piece.offset + piece.stop - piece.start - 1] = END_OF_DOCUMENT
            segment_ids[piece.offset : piece.offset + piece.stop - piece.start] = number
        return {"tokens": tokens, "segment_ids": segment_ids}

    def byte_targets(self, index: int) -> np.ndarray:
        """Positions in `documents.text` of the bytes that row `index` predicts, int64 [targets]."""
        spans = []
        for piece in self.plan[index]:
            begin, end = self.documents.starts[piece.document : piece.document + 2]
            spans.append(np.arange(begin + piece.start, min(begin + piece.stop - 1, end)))
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)


def held_out_rows(rows: PackedRows, num_bytes: int | None) -> list[int]:
    """A fixed sample of rows with about `num_bytes` tokens (all rows for None), spread evenly.

    Every run of the same corpus and length evaluates the same rows; a smaller sample is the
    beginning of a larger one.
    """
    order = document_order([str(i) for i in range(len(rows))], seed=0)
    if num_bytes is None:
        return order
    return order[: max(1, -(-num_bytes // rows.length))]
