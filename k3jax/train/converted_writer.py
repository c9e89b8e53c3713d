"""Writes the weights of a converted run: reading, saving and hashing at the same time."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from k3jax.checkpoint.hf import abstract_source, parts_by_variable, variable_type
from k3jax.checkpoint.manifest import sha256
from k3jax.checkpoint.place import place_variable
from k3jax.checkpoint.source import Source, num_workers
from k3jax.checkpoint.staging import Digests, Staging
from k3jax.checkpoint.tensors import FileTensor
from k3jax.nn.parameters import named_variables
from k3jax.train.converted import STEP, WEIGHTS, write_part

PART_BYTES = 1 << 28  # saved together; as much as the largest variable, where that is more


def write_weights(
    source: Source, dtype: np.dtype | None, staging: Staging, progress: Callable[[int], None]
) -> None:
    """Save every variable into `checkpoints/0/weights/`, part by part; complete parts stay.

    While one part is saved the next is read, if both fit into the memory of the largest variable
    and two files of the source.

    Args:
        source: the tensors.
        dtype: type of the parameters that may be converted; None keeps what is stored.
        staging: the run directory being made.
        progress: told about bytes read.
    """
    folder = staging.folder / "checkpoints" / STEP / WEIGHTS
    folder.mkdir(parents=True, exist_ok=True)
    variables = named_variables(abstract_source(source))
    tensors = parts_by_variable(source)
    types = {name: variable_type(v, tensors[name], dtype) for name, v in variables.items()}
    sizes = {name: v.size * types[name].itemsize for name, v in variables.items()}
    limit = max(PART_BYTES, *sizes.values())
    budget = _Budget(min(2 * limit, max(sizes.values()) + 2 * _largest_file(source)))

    def save(part: Path, unit: str, arrays: dict[str, jax.Array], size: int) -> None:
        try:
            write_part(part, arrays)
        finally:
            arrays.clear()
            budget.give_back(size)
        recording.append(hashing.submit(_record_part, staging, unit, part))

    saving_now: list[concurrent.futures.Future] = []
    recording: list[concurrent.futures.Future] = []
    with (
        concurrent.futures.ThreadPoolExecutor(1, "digests") as hashing,
        concurrent.futures.ThreadPoolExecutor(1, "saving") as saving,
        concurrent.futures.ThreadPoolExecutor(num_workers(), "reading") as reading,
        jax.default_device(jax.devices("cpu")[0]),
    ):
        for number, names in enumerate(_cut_into_parts(sizes, limit)):
            part = folder / f"{number:05d}"
            unit = part.relative_to(staging.folder).as_posix()
            if unit in staging.units:
                continue
            size = sum(sizes[name] for name in names)
            budget.take(size)
            arrays = {
                name: place_variable(
                    variables[name].shape, types[name], tensors[name], None, reading, progress
                )
                for name in names
            }
            _raise_failure(saving_now)
            saving_now.append(saving.submit(save, part, unit, arrays, size))
            del arrays
        concurrent.futures.wait(saving_now)
        _raise_failure(saving_now)
    _raise_failure(recording)


class _Budget:
    """Bytes that may be in memory at once; a single taker always gets what it asks for."""

    def __init__(self, size: int):
        self._size, self._taken = size, 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + size <= self._size)
            self._taken += size

    def give_back(self, size: int) -> None:
        with self._changed:
            self._taken -= size
            self._changed.notify()


def _raise_failure(futures: list[concurrent.futures.Future]) -> None:
    for future in futures:
        if future.done():
            future.result()


def _largest_file(source: Source) -> int:
    files = {
        tensor.stored.file for tensor in source.tensors.values() if isinstance(tensor, FileTensor)
    }
    return max((file.stat().st_size for file in files), default=0)


def _record_part(staging: Staging, unit: str, part: Path) -> None:
    files = (path for path in sorted(part.rglob("*")) if path.is_file())
    digests: Digests = {
        path.relative_to(staging.folder).as_posix(): [path.stat().st_size, sha256(path)]
        for path in files
    }
    staging.record(unit, digests)


def _cut_into_parts(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
    names, total = [], 0
    for name, size in sizes.items():
        if names and total + size > limit:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names
