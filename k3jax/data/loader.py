"""Batches of packed rows by grain: deterministic, restartable, sharded by process."""

import grain
import jax
import numpy as np

from k3jax.data.packing import PackedRows

# Building a row is a few copies of one memory range: one reader keeps ahead of any model.
READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


class Loader:
    """Endless iterator over batches; a new order of the rows in each epoch.

    Batch number n of the whole job depends on (rows, batch, seed) alone. Process p of P receives
    rows p, p + P, ... of it.

    Args:
        rows: what to read.
        batch: rows per step over all processes.
        seed: order of the rows.
        process_index, process_count: default to those of jax.
    """

    def __init__(
        self,
        rows: PackedRows,
        *,
        batch: int,
        seed: int,
        process_index: int | None = None,
        process_count: int | None = None,
    ):
        index = jax.process_index() if process_index is None else process_index
        count = jax.process_count() if process_count is None else process_count
        if batch % count:
            raise ValueError(f"batch={batch} must be divisible by the {count} processes")
        dataset = grain.MapDataset.source(rows).shuffle(seed=seed).repeat(None)
        dataset = dataset[index::count].batch(batch // count, drop_remainder=True)
        self._iterator = iter(dataset.to_iter_dataset(READ_OPTIONS))

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> dict[str, np.ndarray]:  # tokens, segment_ids: int32 [B, T]
        return next(self._iterator)

    def get_state(self) -> dict:
        """Position as a JSON dictionary: the next batch after it is the next one to come."""
        return self._iterator.get_state()

    def set_state(self, state: dict) -> None:
        """Continue at a position from `get_state`."""
        self._iterator.set_state(state)
