"""The tensors of a checkpoint folder: names, places in the files, and reading bytes. No jax."""

import dataclasses
import os
import threading
from pathlib import Path

import numpy as np

from k3jax.checkpoint.errors import CheckpointError
from k3jax.checkpoint.headers import StoredTensor, read_header, read_strict_json

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
        files: the safetensors files, in order.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    misplaced: dict[str, str]
    files: tuple[Path, ...]

    @property
    def is_packed(self) -> bool:
        """Whether routed experts are stored as MXFP4."""
        return any(name.endswith(".weight_packed") for name in self.tensors)

    @property
    def has_vision(self) -> bool:
        """Whether any tensor of a vision tower or projector is stored."""
        names = (*self.tensors, *self.misplaced)
        return any(name.startswith(VISION_PREFIXES) for name in names)

    @property
    def largest_file_bytes(self) -> int:
        """Size of the largest shard."""
        return max(file.stat().st_size for file in self.files)


def open_folder(path: str | Path) -> CheckpointFolder:
    """Read the index, if there is one, and the headers of all files.

    Without an index the folder is `model.safetensors`, or else every `*.safetensors` file.

    Raises:
        CheckpointError: a file that cannot be read, an index that names files which do not exist,
            a tensor stored twice.
    """
    path = Path(path)
    weight_map = read_weight_map(path)
    if weight_map is None:
        single = path / "model.safetensors"
        files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path} has no *.safetensors file and no {INDEX}")
    else:
        files = [path / name for name in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{path / INDEX} names files that do not exist: {absent[:5]}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            # A name that the index puts into another file is a stray copy there.
            if weight_map is not None and weight_map.get(name, file.name) != file.name:
                continue
            short = name.removeprefix(PREFIX)
            if short in tensors:
                raise CheckpointError(
                    f"{name} is stored twice: in {tensors[short].file} and {file}"
                )
            tensors[short] = tensor
    listed = {name.removeprefix(PREFIX): file for name, file in (weight_map or {}).items()}
    misplaced = {name: file for name, file in listed.items() if name not in tensors}
    return CheckpointFolder(path, tensors, misplaced, tuple(files))


def read_weight_map(path: Path) -> dict[str, str] | None:
    """Stored name -> file name, as the index says; None without an index.

    Raises:
        CheckpointError: the index is not one, has a name twice, or leaves the folder.
    """
    index = path / INDEX
    if not index.is_file():
        return None
    try:
        weight_map = read_strict_json(index.read_bytes())["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map is not an object with names")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{name} is not put into a file of this folder: {file!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error})") from error
    return weight_map


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
