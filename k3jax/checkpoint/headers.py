"""Headers of safetensors files, read strictly and written. No jax.

A file is 8 bytes with the length of the header (little endian), the header (JSON: name -> dtype,
shape, data_offsets), and the data. Every byte of the data belongs to exactly one tensor.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from k3jax.checkpoint.errors import CheckpointError, show_name

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
# The types that a model of this family is stored in.
NUMPY_TYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
}
TYPE_NAMES = {dtype: name for name, dtype in NUMPY_TYPES.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: what the header says, and the first byte counted from the file's own."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, in the order of their data.

    Raises:
        CheckpointError: the file cannot be read, is truncated or longer than its header says, or
            the header is not one: not JSON in UTF-8, a name twice, metadata that are not texts,
            bytes of no or of two tensors.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            return _parse(file, size, stream)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from error


def _parse(file: Path, size: int, stream) -> dict[str, StoredTensor]:
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"{size} bytes cannot hold a header of {length}")
    document = read_strict_json(stream.read(length))
    if not isinstance(document, dict):
        raise ValueError("the header is not a JSON object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ is not an object of texts")
    begin = 8 + length
    tensors = sorted(
        (_entry(file, name, entry, begin) for name, entry in document.items()),
        key=lambda tensor: (tensor.offset, tensor.num_bytes),
    )
    end = begin
    for tensor in tensors:
        if tensor.offset != end:
            raise ValueError(
                f"the data of {show_name(tensor.name)} begins at byte {tensor.offset - begin}, "
                f"not at {end - begin} where the tensor before it ends"
            )
        end += tensor.num_bytes
    if end != size:
        state = "truncated" if size < end else "too long"
        raise ValueError(f"{state}: {size} bytes, and the header describes {end}")
    return {tensor.name: tensor for tensor in tensors}


def _entry(file: Path, name: str, entry: Any, begin: int) -> StoredTensor:
    shown = show_name(name)
    if not _is_unicode(name):
        raise ValueError(f"the name {shown} holds half a character")
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"the entry of {shown} is not dtype, shape and data_offsets") from error
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"{shown} has shape {list(shape)} and data_offsets {[start, stop]}")
    if not isinstance(entry["shape"], list) or not isinstance(dtype, str):
        raise ValueError(f"{shown} has dtype {dtype!r} and shape {entry['shape']!r}")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{shown} has the unknown dtype {dtype!r}")
    tensor = StoredTensor(file, name, dtype, shape, begin + start)
    if stop - start != tensor.num_bytes:
        raise ValueError(
            f"{shown} {dtype} {list(shape)} needs {tensor.num_bytes} bytes, its data_offsets "
            f"{[start, stop]} give {stop - start}"
        )
    return tensor


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_strict_json(text: bytes) -> Any:
    """JSON in UTF-8 without a mark at its start, in which no object has a key twice.

    NaN and infinities, which JSON does not have, are refused too.

    Raises:
        ValueError: it is not.
    """

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice!r} stands twice")
        return found

    def refuse_constant(name: str):
        raise ValueError(f"{name} is not JSON")

    # Text, not bytes: from bytes the parser would guess UTF-16 and UTF-32.
    return json.loads(
        text.decode("utf-8"), object_pairs_hook=refuse_duplicates, parse_constant=refuse_constant
    )


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a file with these (name, dtype, shape), their data following in order.

    Padded to a multiple of 8 bytes, as readers that map the file need it.
    """
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # loaders ask for the format
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
