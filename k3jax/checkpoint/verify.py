"""Whether a checkpoint on disk is whole: names, types, values and recorded checksums."""

import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from k3jax.checkpoint.check import decay_fault, find_header_faults, is_scale, scale_fault
from k3jax.checkpoint.errors import show_name
from k3jax.checkpoint.folder import INDEX, FileReader, open_folder
from k3jax.checkpoint.headers import NUMPY_TYPES, StoredTensor
from k3jax.checkpoint.manifest import read_manifest, sha256
from k3jax.checkpoint.names import placements
from k3jax.checkpoint.placement import Placement
from k3jax.checkpoint.source import num_workers
from k3jax.checkpoint.tensors import FileTensor, row_blocks
from k3jax.config import K3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found.

    Attributes:
        faults: one line each; empty when all is well.
        num_tensors: tensors read.
        num_bytes: bytes of the shards.
        num_checksums: files compared with `SHA256SUMS`; None when nothing was recorded.
    """

    faults: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    num_checksums: int | None


def verify_hf(
    path: str | Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> Verification:
    """Read every byte of a checkpoint in the released layout and report all that is wrong.

    Checked are: the files and the index, which must name every tensor; missing, unknown, misshaped
    and wrongly typed tensors; numbers that are not finite, scale bytes that mean NaN and padding
    that is not zero; the checksums of `SHA256SUMS` where that file exists.

    Args:
        path: the folder.
        progress: called with (bytes read since the last call, bytes in all).

    Raises:
        FileNotFoundError, ConfigError: no `config.json` that can be read.
        CheckpointError: no checkpoint at all, or an index or manifest that is not one.
    """
    path = Path(path)
    cfg = K3Config.from_hf(path)
    folder = open_folder(path)
    if not folder.has_vision:
        cfg = dataclasses.replace(cfg, vision=None)
    expected = {p.released: p for p in placements(cfg, packed=folder.is_packed)}
    faults = list(folder.faults)
    named = find_header_faults(folder, cfg, expected)
    # What an unreadable file holds is not missing, it is in there.
    faults += [f for f in named if not (folder.faults and f.startswith("missing:"))]
    stored = sum(tensor.num_bytes for tensor in folder.tensors.values())
    if folder.total_size not in (None, stored) and not folder.faults:
        faults.append(
            f"{INDEX}: total_size {folder.total_size} but the tensors have {stored} bytes"
        )
    faults += [
        f"index: {show_name(name)} is stored in {file} but {INDEX} does not have it"
        for name, file in folder.unindexed.items()
    ]
    recorded = read_manifest(path)
    total = sum(file.stat().st_size for file in folder.files)
    by_file: dict[Path, list[StoredTensor]] = {file: [] for file in folder.files}
    for tensor in folder.tensors.values():
        by_file[tensor.file].append(tensor)
    digests: dict[str, str] = {}

    def read(file: Path) -> list[str]:
        found, digests[file.name] = _read_shard(
            file, by_file[file], expected, recorded is not None, lambda n: progress(n, total)
        )
        return found

    with concurrent.futures.ThreadPoolExecutor(num_workers()) as pool:
        for found in pool.map(read, by_file):
            faults += found
    if recorded is not None:
        faults += _checksum_faults(path, recorded, digests)
    return Verification(
        faults=tuple(faults),
        num_tensors=len(folder.tensors),
        num_bytes=total,
        num_checksums=None if recorded is None else len(recorded),
    )


def _read_shard(
    file: Path,
    tensors: list[StoredTensor],
    expected: dict[str, Placement],
    with_digest: bool,
    progress: Callable[[int], None],
) -> tuple[list[str], str]:
    """Faults of the values of one shard, and its SHA-256 (empty when it is not asked for)."""
    digest, faults, end = hashlib.sha256(), [], 0
    with FileReader() as reader:

        def skip(stop: int) -> None:  # the header, and stray tensors
            if with_digest and stop > end:
                between = np.empty(stop - end, np.uint8)
                reader.read_into(file, end, between)
                digest.update(between)

        for stored in sorted(tensors, key=lambda tensor: tensor.offset):
            skip(stored.offset)
            end = stored.offset + stored.num_bytes
            if stored.dtype not in NUMPY_TYPES:
                raw = StoredTensor(file, stored.name, "U8", (stored.num_bytes,), stored.offset)
                stored = raw
            tensor = FileTensor(reader, stored)
            finding = _ValueCheck(stored, expected)
            for start, stop in row_blocks(tensor):
                rows = tensor.rows(start, stop)
                if with_digest:
                    digest.update(rows.reshape(-1).view(np.uint8))
                finding.look(rows)
                progress(rows.nbytes)
            faults += finding.faults()
        skip(file.stat().st_size)
    return faults, digest.hexdigest() if with_digest else ""


class _ValueCheck:
    """Looks at the rows of one tensor."""

    def __init__(self, stored: StoredTensor, expected: dict[str, Placement]):
        self._name = show_name(stored.name)
        self._placement = expected.get(stored.name.removeprefix("language_model."))
        self._is_scale = stored.dtype == "U8" and is_scale(stored.name)
        self._kept: list[np.ndarray] = []
        self._non_finite = 0

    def look(self, rows: np.ndarray) -> None:
        is_decay = self._placement is not None and self._placement.layout == "decay"
        if self._is_scale or is_decay:
            self._kept.append(rows)
        if rows.dtype != np.uint8:
            self._non_finite += count_non_finite(rows)

    def faults(self) -> Iterator[str]:
        if self._non_finite:
            yield f"value: {self._name}: {self._non_finite} numbers are not finite"
        if self._kept:
            whole = np.concatenate(self._kept)
            if self._is_scale:
                found = scale_fault(self._name, whole)
            else:
                found = decay_fault(self._name, whole, self._placement.num_heads)
            if found is not None:
                yield found


def count_non_finite(numbers: np.ndarray) -> int:
    """NaN and infinities of a float array."""
    if numbers.dtype.itemsize == 2:  # by their exponent bits: much faster than the type's own test
        exponent = np.uint16(0x7C00 if numbers.dtype == np.float16 else 0x7F80)
        bits = numbers.view(np.uint16)
        return int(np.count_nonzero((bits & exponent) == exponent))
    return int(np.count_nonzero(~np.isfinite(numbers)))


def _checksum_faults(
    path: Path, recorded: dict[str, str], digests: dict[str, str]
) -> Iterator[str]:
    for name, digest in recorded.items():
        if not (path / name).is_file():
            yield f"checksum: {show_name(name)} is missing"
        elif (digests.get(name) or sha256(path / name)) != digest:
            yield f"checksum: {name} has other contents than were recorded"
    for name in digests.keys() - recorded.keys():
        yield f"checksum: {name} is not recorded"
