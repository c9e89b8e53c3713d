"""Batches of rows by grain: deterministic, restartable, each process its own rows."""

from collections.abc import Sequence

import grain
import jax
import numpy as np

from k3jax.data.mixture import Mixture, spread
from k3jax.media import Media

# Building a row is a few copies of one memory range: one reader keeps ahead of any model.
READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
ENDLESS = 1 << 40  # batches


class Batches:
    """Random access batches: `batches[n]` holds the rows of step n that this process computes.

    A batch is rows n * B ... n * B + B - 1 of the mixture, those with pictures spread evenly over
    it, so that devices and micro-batches get like shares. Pictures of a micro-batch fill one block
    of a static size; they are those of all its rows, whichever of them this process holds.

    Args:
        mixture: endless rows.
        batch: rows per step over all processes, B.
        micro_batches: parts that are computed one after the other.
        rows: which of the B rows to load, ascending.
    """

    def __init__(
        self, mixture: Mixture, *, batch: int, micro_batches: int, rows: Sequence[int] | None
    ):
        if batch % micro_batches:
            raise ValueError(
                f"batch={batch} must be divisible by the {micro_batches} micro-batches"
            )
        self.mixture, self.batch = mixture, batch
        self.rows = list(range(batch) if rows is None else rows)
        self._micro_rows = batch // micro_batches
        self._with_pictures = {
            name for name, source in mixture.sources.items() if hasattr(source, "most_pictures")
        }
        if self._with_pictures:
            shown = mixture.most_in_window(self._with_pictures, batch)
            shown = -(-shown // micro_batches)
            sources = [mixture.sources[name] for name in self._with_pictures]
            self._patch_size = sources[0].patch_size
            self._items = shown * max(source.most_pictures for source in sources)
            self._patches = shown * max(
                source.most_pictures * source.patches_per_picture for source in sources
            )

    def __len__(self) -> int:
        return ENDLESS

    def __repr__(self) -> str:  # grain names sources in its messages
        return f"Batches(batch={self.batch}, shares={self.mixture.shares})"

    def __getitem__(self, index: int) -> dict:
        numbers = range(index * self.batch, (index + 1) * self.batch)
        shows = np.array([self.mixture.source_of(n) in self._with_pictures for n in numbers])
        order = spread(shows)
        needed = {*self.rows, *np.flatnonzero(shows[order])}
        rows = {at: self.mixture[numbers[order[at]]] for at in sorted(needed)}
        batch = {
            name: np.stack([rows[at][name] for at in self.rows])
            for name in ("tokens", "segment_ids")
        }
        if self._with_pictures:
            blocks = [
                join_pictures(
                    [rows[at] for at in range(first, first + self._micro_rows) if at in rows],
                    self._patches,
                    self._items,
                    self._patch_size,
                )
                for first in range(0, self.batch, self._micro_rows)
            ]
            batch["media"] = jax.tree.map(lambda *parts: np.concatenate(parts), *blocks)
        return batch

    def count_rows(self, index: int) -> dict[str, int]:
        """How many rows the whole batch has, and how many of them show pictures."""
        numbers = range(index * self.batch, (index + 1) * self.batch)
        shows = [self.mixture.source_of(n) in self._with_pictures for n in numbers]
        return {"rows": self.batch, "picture_rows": sum(shows)}


def join_pictures(rows: list[dict], num_patches: int, num_items: int, patch_size: int) -> Media:
    """The pictures of some rows as one Media of static size; rows without pictures add none."""
    shown = [row for row in rows if "patches" in row]

    def filled(name: str, capacity: int, shape, dtype):
        array, at = np.zeros((capacity, *shape), dtype), 0
        for row in shown:
            array[at : at + len(row[name])] = row[name]
            at += len(row[name])
        return array

    return Media(
        patches=filled("patches", num_patches, (3, patch_size, patch_size), np.float32),
        grids=filled("grids", num_items, (3,), np.int32),
        sizes=filled("sizes", num_items, (2,), np.int32),
    )


class Loader:
    """Endless iterator over batches that remembers its position.

    Batch number n of the whole job depends on the mixture and its batch size alone.

    Args:
        mixture: endless rows.
        batch: rows per step over all processes.
        micro_batches: see `Batches`.
        rows: which rows of a batch to load; all by default.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        batch: int,
        micro_batches: int = 1,
        rows: Sequence[int] | None = None,
    ):
        self.batches = Batches(mixture, batch=batch, micro_batches=micro_batches, rows=rows)
        self._iterator = iter(grain.MapDataset.source(self.batches).to_iter_dataset(READ_OPTIONS))

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> dict:
        """{"tokens", "segment_ids": int32 [B, T]; "media": Media, where the mixture has any}."""
        return next(self._iterator)

    def shapes(self) -> dict:
        """Shapes and types of what this process loads of a batch."""
        return jax.eval_shape(lambda: self.batches[0])

    def get_state(self) -> dict:
        """Position as a JSON dictionary: the next batch after it is the next one to come."""
        return self._iterator.get_state()

    def set_state(self, state: dict) -> None:
        """Continue at a position from `get_state`."""
        self._iterator.set_state(state)
