"""Byte-pair encoding in tiktoken form: pieces by a pattern, merges by rank."""

import functools
import heapq
import re
from collections.abc import Iterator, Mapping

from k3jax.errors import UserError

# `&&` is set intersection. tiktoken reads the pattern as it is, the `regex` package as version 1.
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
MAX_BLOCK = 400_000  # characters that are split by the pattern at once
MAX_RUN = 25_000  # characters of one run of blanks, or of other characters, that stay together
CACHED_PIECES = 65_536

_RUNS = re.compile(r"\s+|\S+")


@functools.cache
def piece_pattern():
    """`PATTERN`, compiled by the `regex` package.

    Raises:
        UserError: `regex` is not installed.
    """
    try:
        import regex
    except ImportError:
        raise UserError(
            "splitting text for a tiktoken vocabulary needs the package regex or tiktoken; "
            "install k3jax[chat]"
        ) from None
    return regex.compile(PATTERN, regex.VERSION1)


def guarded_blocks(text: str) -> Iterator[str]:
    """Cut `text` as the released tokenizer does, which bounds the time of hostile input.

    Blocks of `MAX_BLOCK` characters; inside a block, a run of blanks or of other characters is
    cut after every `MAX_RUN`. Cuts change ids, so they are the same ones as released.
    """
    for begin in range(0, len(text), MAX_BLOCK):
        block = text[begin : begin + MAX_BLOCK]
        start = 0
        if len(block) > MAX_RUN:
            for run in _RUNS.finditer(block):
                for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                    yield block[start:cut]
                    start = cut
        yield block[start:]


class BytePairMerges:
    """Merges in pure Python: a piece that has a rank is one token, else the lowest rank first.

    Args:
        ranks: token bytes to rank, which is its id; must hold all 256 single bytes.
    """

    def __init__(self, ranks: Mapping[bytes, int]):
        self._ranks = ranks
        self._piece_ids = functools.lru_cache(CACHED_PIECES)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, which holds no lone surrogates and has passed `guarded_blocks`."""
        ids: list[int] = []
        for piece in piece_pattern().findall(text):
            ids += self._piece_ids(piece)
        return ids

    def _merge(self, piece: str) -> tuple[int, ...]:
        """Join the adjacent pair of lowest rank, the leftmost of equals, until none has a rank.

        A heap of candidate pairs and neighbour links: O(n log n) for n bytes, where searching all
        pairs after each merge would be O(n^2).
        """
        raw = piece.encode()
        ranks = self._ranks
        if (whole := ranks.get(raw)) is not None:
            return (whole,)
        size = len(raw)
        end = list(range(1, size + 1))  # end[i]: where the part that starts at i ends; 0 if merged
        before = list(range(-1, size))  # before[i]: start of the part left of the one at i
        candidates: list[tuple[int, int, int]] = []

        def offer(start: int, stop: int) -> None:
            rank = ranks.get(raw[start:stop])
            if rank is not None:
                heapq.heappush(candidates, (rank, start, stop))

        for start in range(size - 1):
            offer(start, start + 2)
        while candidates:
            _, start, stop = heapq.heappop(candidates)
            middle = end[start]
            # Out of date unless two parts still fill start..stop.
            if not middle or middle >= stop or end[middle] != stop:
                continue
            end[start], end[middle] = stop, 0
            if stop < size:
                before[stop] = start
                offer(start, end[stop])
            if start:
                offer(before[start], stop)
        return tuple(ranks[raw[i : end[i]]] for i in range(size) if end[i])
