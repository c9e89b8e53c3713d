"""Write a model as a checkpoint in the released layout."""

import collections
import concurrent.futures
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from k3jax.checkpoint.errors import CheckpointError
from k3jax.checkpoint.folder import INDEX
from k3jax.checkpoint.hf import check_dtype
from k3jax.checkpoint.manifest import write_manifest
from k3jax.checkpoint.names import placements, released_name
from k3jax.checkpoint.shards import Shard, Stopped, plan_shards, tensor_bytes, write_shard
from k3jax.checkpoint.source import Experts, Source, convert_source
from k3jax.checkpoint.staging import Staging
from k3jax.checkpoint.stored_config import stored_config
from k3jax.checkpoint.target import check_target
from k3jax.checkpoint.tensors import ArrayTensor
from k3jax.errors import UserError
from k3jax.model import K3
from k3jax.nn.parameters import named_variables

SHARD_BYTES = 5 * 10**9
WRITERS = 2  # shards written at once: one is hashed while the other waits for the disk
HELD_SLICES = 8  # of scanned variables, per writer: those of one layer that are used in turns


def save_hf(
    model: K3,
    path: str | Path,
    *,
    experts: Experts = "auto",
    rule: str = "even",
    dtype=None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write safetensors shards, their index, `config.json` and `SHA256SUMS`.

    The folder appears when all of it is on disk. What was loaded in the types of the release and
    not changed comes out byte for byte; a type that `load_hf` changed (it warns of layers stored
    in several) stays changed, where `convert_hf` copies exactly. On an accelerator one layer at a
    time is copied to the host.

    Args:
        model: the model.
        path: folder to make; it must not exist or be empty.
        experts: "packed" writes routed experts in MXFP4, "dequantized" in bfloat16 (or `dtype`),
            "auto" as the model holds them.
        rule: how scales are chosen when experts are packed: "floor", "ceil" or "even".
        dtype: type of what the release stores in bfloat16; None keeps the model's types.
        shard_bytes: largest size of a file, unless one tensor is larger.
        overwrite: replace the checkpoint that the folder holds.
        progress: called with numbers of bytes that have been written, from several threads.

    Raises:
        UserError: the folder is taken, the disk is too small, an unknown choice, experts that
            cannot be packed, or a model with arrays of other processes.
    """
    check_target(path, overwrite)
    source = convert_source(
        model_source(model), experts=experts, rule=rule, dtype=check_dtype(dtype)
    )
    num_bytes = count_bytes(source)
    with Staging(path, identity=None, overwrite=overwrite, num_bytes=num_bytes) as staging:
        write_released(source, staging, shard_bytes=shard_bytes, progress=progress)


def model_source(model: K3) -> Source:
    """The tensors of a model in memory.

    Raises:
        UserError: its variables are not those of its configuration, or not all in this process.
    """
    variables = named_variables(model)
    packed = any(name.endswith(".codes") for name in variables)
    table = {p.released: p for p in placements(model.cfg, packed=packed)}
    expected = {placement.variable for placement in table.values()}
    if expected != variables.keys():
        differ = sorted(expected ^ variables.keys())
        raise UserError(f"the model's variables are not those of its configuration: {differ[:5]}")
    for name, variable in variables.items():
        if not variable[...].is_fully_addressable:
            raise UserError(f"{name} lies partly in other processes; gather the model first")
    slices = _HostSlices({name: variable[...] for name, variable in variables.items()})
    tensors = {
        name: ArrayTensor(p, partial(slices.part, p.variable, p.index), variables[p.variable].dtype)
        for name, p in table.items()
    }
    return Source(cfg=model.cfg, packed=packed, placements=table, tensors=tensors)


class _HostSlices:
    """Parts of arrays on the host: views where the array is in host memory, else small copies."""

    def __init__(self, arrays: dict[str, jax.Array]):
        self._arrays = arrays
        self._views = {name: _host_view(array) for name, array in arrays.items()}
        self._held = threading.local()

    def part(self, name: str, index: tuple[int, ...]) -> np.ndarray:
        """array[index]."""
        view = self._views[name]
        if view is not None:
            return view[index]
        held = self._held.__dict__.setdefault("slices", collections.OrderedDict())
        key = (name, index[:1])
        if key not in held:
            held[key] = _copy_to_host(self._arrays[name], *index[:1])
            while len(held) > HELD_SLICES:
                held.popitem(last=False)
        held.move_to_end(key)
        return held[key][index[1:]]


def _host_view(array: jax.Array) -> np.ndarray | None:
    is_host = all(device.platform == "cpu" for device in array.sharding.device_set)
    if not is_host or not array.is_fully_replicated:
        return None
    return np.asarray(array.addressable_data(0))


def _copy_to_host(array: jax.Array, first: int | None = None) -> np.ndarray:
    """array[first], or all of it, put together from the slices of the devices.

    Each device is asked by itself: no collective runs, whichever thread this is.
    """
    skipped = 0 if first is None else 1
    host = np.empty(array.shape[skipped:], array.dtype)
    slices = {str(shard.index): shard for shard in array.addressable_shards}
    for shard in slices.values():
        data, start = shard.data, 0
        if first is not None:
            start, stop, _ = shard.index[0].indices(array.shape[0])
            if not start <= first < stop:
                continue
            data = _take(data, first - start)
        host[shard.index[skipped:]] = np.asarray(data)
    return host


@jax.jit
def _take(array: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)


def count_bytes(source: Source) -> int:
    """Bytes of all tensors."""
    return sum(map(tensor_bytes, source.tensors.values()))


def write_released(
    source: Source,
    staging: Staging,
    *,
    shard_bytes: int,
    progress: Callable[[int], None],
    others: Sequence[Path] = (),
) -> None:
    """Fill and commit a staged folder; shards that it holds already are not written again.

    Args:
        source: what to write.
        staging: where.
        shard_bytes: largest size of a file.
        progress: told about bytes written or found.
        others: files to copy beside the tensors.
    """
    if shard_bytes < 1:
        raise UserError(f"shard_bytes={shard_bytes} must be at least 1")
    full = {released_name(source.cfg, name): t for name, t in source.tensors.items()}
    shards = plan_shards(full, shard_bytes)
    _write_shards([s for s in shards if s.name not in staging.units], staging, progress)
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    index = {
        "metadata": {"total_size": sum(shard.num_bytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    dtype = source.tensors["model.embed_tokens.weight"].dtype
    config = stored_config(source.cfg, packed=source.packed, dtype=dtype)
    staging.add(INDEX, json.dumps(index, indent=2) + "\n")
    staging.add("config.json", json.dumps(config, indent=2) + "\n")
    for path in others:
        staging.copy(path)
    write_manifest(staging.folder, {name: digest for name, (_, digest) in staging.files.items()})
    staging.commit()


def _write_shards(shards: list[Shard], staging: Staging, progress: Callable[[int], None]) -> None:
    stop = threading.Event()

    def write(shard: Shard) -> None:
        try:
            written = write_shard(staging.folder, shard, progress, stop)
            staging.record(shard.name, {shard.name: written})
        except Stopped:
            pass
        except OSError as error:
            raise CheckpointError(f"{staging.folder / shard.name}: {error.strerror}") from error

    with concurrent.futures.ThreadPoolExecutor(WRITERS) as pool:
        running = [pool.submit(write, shard) for shard in shards]
        try:
            for future in concurrent.futures.as_completed(running):
                future.result()
        except BaseException:
            stop.set()
            for future in running:
                future.cancel()
            raise
