"""Batches of rows by grain: deterministic, restartable, sharded by process."""

import grain
import jax
import numpy as np

from k3jax.data.bytes import MEDIA_PAD
from k3jax.data.mixture import Mixture, spread
from k3jax.media import Media

# Building a row is a few copies of one memory range: one reader keeps ahead of any model.
READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
ENDLESS = 1 << 40  # batches


class Batches:
    """Random access batches: `batches[n]` is the part of step n that this process computes.

    A batch is rows n * B ... n * B + B - 1 of the mixture, those with pictures spread evenly over
    it, so that processes and micro-batches get like shares. Process p of P takes the p-th of P
    contiguous parts. Pictures of a micro-batch fill one block of a static size.

    Args:
        mixture: endless rows.
        batch: rows per step over all processes, B.
        micro_batches: parts that a process computes one after the other.
        process: (index, count).
    """

    def __init__(
        self, mixture: Mixture, *, batch: int, micro_batches: int, process: tuple[int, int]
    ):
        index, count = process
        if batch % (count * micro_batches):
            raise ValueError(
                f"batch={batch} must be divisible by the {count} processes times the "
                f"{micro_batches} micro-batches"
            )
        self.mixture, self.batch = mixture, batch
        local = batch // count
        self._own = slice(index * local, (index + 1) * local)
        self._micro_rows = local // micro_batches
        self._with_pictures = {
            name for name, rows in mixture.sources.items() if hasattr(rows, "most_pictures")
        }
        if self._with_pictures:
            rows = mixture.most_in_window(self._with_pictures, batch)
            rows = -(-rows // (count * micro_batches))
            sources = [mixture.sources[name] for name in self._with_pictures]
            self._patch_size = sources[0].patch_size
            self._items = rows * max(source.most_pictures for source in sources)
            self._patches = rows * max(
                source.most_pictures * source.patches_per_picture for source in sources
            )

    def __len__(self) -> int:
        return ENDLESS

    def __repr__(self) -> str:  # grain names sources in its messages
        return f"Batches(batch={self.batch}, shares={self.mixture.shares})"

    def __getitem__(self, index: int) -> dict:
        numbers = range(index * self.batch, (index + 1) * self.batch)
        shows = np.array([self.mixture.source_of(n) in self._with_pictures for n in numbers])
        rows = [self.mixture[numbers[i]] for i in spread(shows)[self._own]]
        batch = {
            "tokens": np.stack([row["tokens"] for row in rows]),
            "segment_ids": np.stack([row["segment_ids"] for row in rows]),
        }
        if self._with_pictures:
            starts = range(0, len(rows), self._micro_rows)
            blocks = [
                join_pictures(
                    rows[at : at + self._micro_rows], self._patches, self._items, self._patch_size
                )
                for at in starts
            ]
            batch["media"] = jax.tree.map(lambda *parts: np.concatenate(parts), *blocks)
        return batch


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


def count_rows(batch: dict) -> dict[str, int]:
    """How many rows a batch has, and how many of them show pictures."""
    shows = (batch["tokens"] == MEDIA_PAD).any(axis=1)
    return {"rows": len(shows), "picture_rows": int(shows.sum())}


class Loader:
    """Endless iterator over batches that remembers its position.

    Batch number n of the whole job depends on the mixture and its batch size alone.

    Args:
        mixture: endless rows.
        batch: rows per step over all processes.
        micro_batches: see `Batches`.
        process_index, process_count: default to those of jax.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        batch: int,
        micro_batches: int = 1,
        process_index: int | None = None,
        process_count: int | None = None,
    ):
        index = jax.process_index() if process_index is None else process_index
        count = jax.process_count() if process_count is None else process_count
        self.batches = Batches(
            mixture, batch=batch, micro_batches=micro_batches, process=(index, count)
        )
        self._iterator = iter(grain.MapDataset.source(self.batches).to_iter_dataset(READ_OPTIONS))

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> dict:
        """{"tokens", "segment_ids": int32 [B, T]; "media": Media, where the mixture has any}."""
        return next(self._iterator)

    def shapes(self) -> dict:
        """Shapes and types of a batch."""
        return jax.eval_shape(lambda: self.batches[0])

    def get_state(self) -> dict:
        """Position as a JSON dictionary: the next batch after it is the next one to come."""
        return self._iterator.get_state()

    def set_state(self, state: dict) -> None:
        """Continue at a position from `get_state`."""
        self._iterator.set_state(state)
