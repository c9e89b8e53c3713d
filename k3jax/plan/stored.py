"""What a checkpoint folder holds, from the headers of its safetensors files alone."""

import dataclasses
import json
import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from k3jax.errors import UserError

INDEX_NAME = "model.safetensors.index.json"

_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1, "I8": 1, "I32": 4, "I64": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """Tensors on disk.

    Attributes:
        num_files: safetensors files present.
        missing_files: files that the index names but the folder lacks.
        num_tensors: tensors in the files present.
        bytes_by_dtype: safetensors type name -> bytes.
    """

    num_files: int
    missing_files: tuple[str, ...]
    num_tensors: int
    bytes_by_dtype: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """Sum over the types."""
        return sum(self.bytes_by_dtype.values())


def read_stored(folder: Path) -> StoredTensors | None:
    """Summarise the safetensors files of a checkpoint; None when it has neither files nor index.

    An index decides which files belong to it; else `model.safetensors`, else all of them.

    Raises:
        UserError: an index or a file header that cannot be read.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index}: not a safetensors index ({error!r})") from error
    elif (folder / "model.safetensors").is_file():
        names = {"model.safetensors"}
    else:
        names = {file.name for file in folder.glob("*.safetensors")}
    if not names:
        return None
    files = [folder / name for name in sorted(names) if (folder / name).is_file()]
    num_tensors, bytes_by_dtype = 0, {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    view = tensors.get_slice(name)
                    dtype = view.get_dtype()
                    size = _BYTES.get(dtype, 1) * math.prod(view.get_shape())
                    bytes_by_dtype[dtype] = bytes_by_dtype.get(dtype, 0) + size
                    num_tensors += 1
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: not a readable safetensors file ({error})") from error
    return StoredTensors(
        num_files=len(files),
        missing_files=tuple(sorted(names - {file.name for file in files})),
        num_tensors=num_tensors,
        bytes_by_dtype=dict(sorted(bytes_by_dtype.items())),
    )
