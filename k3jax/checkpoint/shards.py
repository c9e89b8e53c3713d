"""Writing safetensors files: which tensors go together, and their bytes with a checksum."""

import dataclasses
import hashlib
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from k3jax.checkpoint.headers import TYPE_NAMES, encode_header
from k3jax.checkpoint.tensors import RowTensor, row_blocks

BUFFER_BYTES = 1 << 20  # small tensors are written together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One file: its name, and its tensors by full name."""

    name: str
    tensors: dict[str, RowTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(map(tensor_bytes, self.tensors.values()))


class Stopped(Exception):
    """Another thread failed: there is no use in going on."""


def tensor_bytes(tensor: RowTensor) -> int:
    """Bytes that a tensor takes in a file."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def plan_shards(tensors: Mapping[str, RowTensor], shard_bytes: int) -> list[Shard]:
    """Cut tensors, in their order, into files of at most `shard_bytes` (or a single tensor).

    Within a file wide types come first: readers that map it need every tensor aligned.
    """
    groups: list[dict[str, RowTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor_bytes(tensor) > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor_bytes(tensor)
    return [
        Shard(
            name=f"model-{number:05d}-of-{len(groups):05d}.safetensors",
            tensors=dict(sorted(group.items(), key=lambda item: -item[1].dtype.itemsize)),
        )
        for number, group in enumerate(groups, start=1)
    ]


def write_shard(
    folder: Path, shard: Shard, progress: Callable[[int], None], stop: threading.Event
) -> list:
    """Write a shard, on disk when this returns.

    Returns:
        [size, SHA-256].

    Raises:
        Stopped: `stop` was set.
    """
    digest = hashlib.sha256()
    header = encode_header(
        (name, TYPE_NAMES[tensor.dtype], tensor.shape) for name, tensor in shard.tensors.items()
    )
    size = len(header)
    with (folder / shard.name).open("wb", buffering=BUFFER_BYTES) as file:
        file.write(header)
        digest.update(header)
        for tensor in shard.tensors.values():
            for start, end in row_blocks(tensor):
                if stop.is_set():
                    raise Stopped
                data = memoryview(tensor.rows(start, end).reshape(-1).view("u1"))
                file.write(data)
                digest.update(data)
                size += len(data)
                progress(len(data))
        file.flush()
        os.fsync(file.fileno())
    return [size, digest.hexdigest()]
