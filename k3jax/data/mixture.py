"""Several sources of rows in fixed proportions, and batches of them.

Proportions are whole numbers of parts per thousand. One period of 1,000 rows holds each source's
share exactly, spread as evenly as possible (smooth weighted round robin), so the realised ratio is
exact over periods and never off by more than one row within one.
"""

import functools
from collections.abc import Collection

import grain
import numpy as np

from k3jax.errors import UserError

PERIOD = 1000


class Mixture:
    """Endless random access rows: `mixture[g]` is a row of one of the sources.

    Args:
        sources: name -> random access source of rows.
        shares: name -> fraction of the rows; they sum to 1, in steps of 0.001.
        seed: order of the rows of each source, another one in each epoch.

    Raises:
        UserError: shares that are negative, finer than 0.001 or do not sum to 1.
    """

    def __init__(self, sources: dict, shares: dict[str, float], seed: int):
        parts = {name: round(PERIOD * share) for name, share in shares.items()}
        for name, share in shares.items():
            if share < 0 or abs(parts[name] - PERIOD * share) > 1e-6:
                raise UserError(
                    f"the share {share} of {name} must be at least 0, in steps of 1/{PERIOD}"
                )
        if sum(parts.values()) != PERIOD:
            raise UserError(f"shares must sum to 1, got {shares}")
        self.shares = {name: share for name, share in shares.items() if parts[name]}
        self.names = tuple(self.shares)
        self.sources = {name: sources[name] for name in self.names}
        self._rows = {
            name: grain.MapDataset.source(sources[name]).shuffle(seed=seed).repeat(None)
            for name in self.names
        }
        order = _smooth_order(tuple(parts[name] for name in self.names))
        self._order = order
        self._rank = np.zeros(PERIOD, np.int64)  # how many rows of the same source came before
        for source in range(len(self.names)):
            own = order == source
            self._rank[own] = np.arange(own.sum())
        self._parts = [parts[name] for name in self.names]

    def source_of(self, row: int) -> str:
        """Name of the source of row number `row`."""
        return self.names[self._order[row % PERIOD]]

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        period, at = divmod(row, PERIOD)
        source = self._order[at]
        index = int(period * self._parts[source] + self._rank[at])
        return self._rows[self.names[source]][index]

    def most_in_window(self, names: Collection[str], batch: int) -> int:
        """Largest number of rows of these sources among any `batch` that follow one another."""
        counted = np.isin(self._order, [self.names.index(name) for name in names])
        whole, rest = divmod(batch, PERIOD)
        ring = np.concatenate([[0], np.cumsum(np.concatenate([counted, counted]))])
        windows = ring[rest : rest + PERIOD] - ring[:PERIOD]
        return int(whole * counted.sum() + windows.max())


@functools.cache
def _smooth_order(parts: tuple[int, ...]) -> np.ndarray:
    """Smooth weighted round robin: source of each row of a period, int [PERIOD].

    Every source gains its share per row; the one that is furthest behind is served and pays 1.
    """
    shares = np.array(parts)
    credit, order = np.zeros(len(parts), np.int64), np.zeros(PERIOD, np.int64)
    for row in range(PERIOD):
        credit += shares
        order[row] = credit.argmax()
        credit[order[row]] -= PERIOD
    return order


def spread(flags: np.ndarray) -> np.ndarray:
    """An order of rows that spreads the flagged ones evenly: a permutation, int [B].

    Any contiguous part of 1/n of the batch then holds at most ceil(flagged / n) of them.
    """
    marked, plain = np.flatnonzero(flags), np.flatnonzero(~flags)
    total, count = len(flags), len(marked)
    slots = np.arange(total)
    here = (slots + 1) * count // total > slots * count // total
    order = np.empty(total, np.int64)
    order[here], order[~here] = marked, plain
    return order
