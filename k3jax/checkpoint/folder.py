"""The tensors of a checkpoint folder: names, places in the files, and reading bytes. No jax."""

import dataclasses
import os
import threading
from pathlib import Path

import numpy as np

from k3jax.checkpoint.errors import CheckpointError, show_name
from k3jax.checkpoint.headers import StoredTensor, read_header, read_strict_json
from k3jax.checkpoint.manifest import is_file_name

PREFIX = "language_model."
INDEX = "model.safetensors.index.json"
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


@dataclasses.dataclass(frozen=True)
class CheckpointFolder:
    """What the headers of a folder say.

    Attributes:
        path: the folder.
        tensors: name without the prefix `language_model.` -> tensor.
        misplaced: name -> file in which the index puts it, but which does not hold it.
        unindexed: name -> file that holds it, of tensors that the index does not have. They are
            read like the others.
        files: the safetensors files that can be read, in order.
        faults: what is wrong with the files themselves.
        total_size: bytes that the index says there are, None when it does not.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    misplaced: dict[str, str]
    unindexed: dict[str, str]
    files: tuple[Path, ...]
    faults: tuple[str, ...]
    total_size: int | None

    @property
    def is_packed(self) -> bool:
        """Whether routed experts are stored as MXFP4."""
        return any(name.endswith(".weight_packed") for name in self.tensors)

    @property
    def has_vision(self) -> bool:
        """Whether any tensor of a vision tower or projector is stored."""
        names = (*self.tensors, *self.misplaced)
        return any(name.startswith(VISION_PREFIXES) for name in names)


def open_folder(path: str | Path) -> CheckpointFolder:
    """Read the index, if there is one, and the headers of all files.

    Without an index the folder is `model.safetensors`, or else every `*.safetensors` file.

    Raises:
        CheckpointError: there is no such file, or the index is not one.
    """
    path = Path(path)
    index = read_index(path)
    faults: list[str] = []
    if index is None:
        weight_map, total_size = {}, None
        single = path / "model.safetensors"
        files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path} has no *.safetensors file and no {INDEX}")
    else:
        weight_map, total_size = index
        files = [path / name for name in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            faults.append(f"{path / INDEX} names files that do not exist: {absent[:5]}")
        files = [file for file in files if file.name not in absent]
    tensors: dict[str, StoredTensor] = {}
    readable, unindexed = [], {}
    for file in files:
        try:
            header = read_header(file)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        readable.append(file)
        for name, tensor in header.items():
            # A name that the index puts into another file is a stray copy here.
            if weight_map.get(name, file.name) != file.name:
                continue
            if weight_map and name not in weight_map:
                unindexed[name] = file.name
            short = name.removeprefix(PREFIX)
            if short in tensors:
                first = tensors[short].file
                faults.append(f"{show_name(name)} is stored twice: in {first} and {file}")
            tensors[short] = tensor
    found = {file.name for file in readable}
    misplaced = {
        short: file
        for name, file in weight_map.items()
        if (short := name.removeprefix(PREFIX)) not in tensors and file in found
    }
    return CheckpointFolder(
        path=path,
        tensors=tensors,
        misplaced=misplaced,
        unindexed=unindexed,
        files=tuple(readable),
        faults=tuple(faults),
        total_size=total_size,
    )


def read_index(path: Path) -> tuple[dict[str, str], int | None] | None:
    """(stored name -> file name, bytes in all) as the index says; None without an index.

    Raises:
        CheckpointError: the index is not one, has a name twice, or leaves the folder.
    """
    index = path / INDEX
    if not index.is_file():
        return None
    try:
        document = read_strict_json(index.read_bytes())
        weight_map = document["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map is not an object with names")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not is_file_name(file):
                raise ValueError(
                    f"{show_name(name)} is not put into a file of this folder: {file!r}"
                )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error})") from error
    metadata = document.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total_size


class FileReader:
    """Reads ranges of files into memory, from any thread. Use as a context manager.

    Plain reads, not a memory map: what was read does not stay in this process.
    """

    def __init__(self):
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "FileReader":
        return self

    def __exit__(self, *_) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read_into(self, file: Path, offset: int, target: np.ndarray) -> None:
        """Fill `target` (contiguous) with the bytes from `offset` on.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        view = memoryview(target.reshape(-1).view(np.uint8))
        try:
            descriptor = self._open(file)
            while view:
                done = os.preadv(descriptor, [view], offset)
                if done == 0:
                    raise CheckpointError(f"{file}: truncated while it was read")
                view, offset = view[done:], offset + done
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]
