"""Load a checkpoint in the released layout: config.json and safetensors."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from k3jax.checkpoint.names import placements
from k3jax.checkpoint.placement import Placement
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.model import K3, abstract_model
from k3jax.nn.parameters import named_variables

PREFIX = "language_model."
INDEX = "model.safetensors.index.json"


class CheckpointError(UserError):
    """A checkpoint folder that cannot be loaded; the message lists every fault found."""


def load_hf(path: str | Path, *, dtype=None) -> K3:
    """Load a text checkpoint with the released tensor names.

    Args:
        path: folder with `config.json` and either one or more `*.safetensors` files or an index
            file that names them. Names may carry the prefix `language_model.` or not.
        dtype: type of the parameters; None keeps what is stored. Parameters that the release
            stores in float32 (decay, convolutions, output-norm weights, balancing bias) stay
            float32.

    Returns:
        The model, its `cfg` read from `config.json`.

    Raises:
        CheckpointError: an unreadable file; or missing, unknown or misshaped tensors, tensors that
            are not floating point, decay parameters with a non-zero tail: all reported together.
    """
    path = Path(path)
    cfg = K3Config.from_hf(path)
    files = tensor_files(path)
    expected = {p.released: p for p in placements(cfg)}
    _check(path, files, expected)
    abstract = abstract_model(cfg)
    by_variable: dict[str, list[Placement]] = defaultdict(list)
    for placement in expected.values():
        by_variable[placement.variable].append(placement)
    values: dict[str, jax.Array] = {}
    with _Reader(files) as reader:
        for name, variable in named_variables(abstract).items():
            values[name] = _assemble(name, variable, by_variable[name], reader, dtype)
    names = iter(named_variables(abstract))
    return jax.tree.map(
        lambda leaf: leaf.replace(values[next(names)]),
        abstract,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )


def tensor_files(path: Path) -> dict[str, tuple[Path, str]]:
    """Released name without prefix -> (file, stored name), from the index or the files' headers."""
    index = path / INDEX
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index ({error})") from error
        absent = sorted({f for f in weight_map.values() if not (path / f).is_file()})
        if absent:
            raise CheckpointError(f"{index} names files that do not exist: {absent[:5]}")
        listed = [(name, path / file) for name, file in weight_map.items()]
        # What the index forgets is there all the same, and is reported as unknown or used.
        for file in sorted(set(weight_map.values())):
            unlisted = set(_open(path / file).keys()) - weight_map.keys()
            listed += [(name, path / file) for name in sorted(unlisted)]
    else:
        single = path / "model.safetensors"
        shards = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
        if not shards:
            raise CheckpointError(f"{path} has no *.safetensors file and no {INDEX}")
        listed = [(name, shard) for shard in shards for name in list(_open(shard).keys())]
    files: dict[str, tuple[Path, str]] = {}
    for name, file in listed:
        short = name.removeprefix(PREFIX)
        if short in files:
            raise CheckpointError(f"{name} is stored twice: in {files[short][0]} and {file}")
        files[short] = (file, name)
    return files


def _open(file: Path):
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from error


class _Reader:
    """Open safetensors files, each opened once."""

    def __init__(self, files: dict[str, tuple[Path, str]]):
        self._files = files
        self._open: dict[Path, Any] = {}
        self._names: dict[Path, set[str]] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._open.clear()

    def _handle(self, file: Path):
        if file not in self._open:
            self._open[file] = _open(file)
            self._names[file] = set(self._open[file].keys())
        return self._open[file]

    def header(self, name: str) -> tuple[tuple[int, ...], str] | None:
        """Shape and stored type; None where the file does not hold what the index says."""
        file, stored = self._files[name]
        handle = self._handle(file)
        if stored not in self._names[file]:
            return None
        view = handle.get_slice(stored)
        return tuple(view.get_shape()), view.get_dtype()

    def read(self, name: str) -> np.ndarray:
        file, stored = self._files[name]
        return self._handle(file).get_tensor(stored)


def _check(path: Path, files, expected: dict[str, Placement]) -> None:
    """Report everything that is wrong with a checkpoint's tensors at once."""
    faults = [f"missing: {name}" for name in expected if name not in files]
    faults += [f"unknown: {name}{_hint(name)}" for name in files if name not in expected]
    with _Reader(files) as reader:
        for name, placement in expected.items():
            if name in files:
                faults += _faults(reader, name, placement, files[name][0])
    if faults:
        shown = "\n  ".join(faults[:40])
        more = f"\n  and {len(faults) - 40} more" if len(faults) > 40 else ""
        raise CheckpointError(f"{path}: {len(faults)} tensors do not fit:\n  {shown}{more}")


def _faults(reader: _Reader, name: str, placement: Placement, file: Path) -> Iterator[str]:
    header = reader.header(name)
    if header is None:
        yield f"missing: {name} is not in {file.name}, where the index puts it"
        return
    shape, dtype = header
    if not placement.matches(shape):
        wanted = (placement.num_heads,) if placement.layout == "decay" else placement.shape
        yield f"shape: {name} is {list(shape)}, expected {list(wanted)}"
    elif not dtype.startswith(("F", "BF")):
        yield f"type: {name} is {dtype}, expected floating point"
    elif placement.layout == "decay":  # the only layout whose values can be wrong
        try:
            _to_ours(placement, reader.read(name), (placement.num_heads,))
        except ValueError as error:
            yield f"value: {error}"


def _hint(name: str) -> str:
    if name.endswith(("weight_packed", "weight_scale")):
        return " (packed MXFP4 experts are not supported by this version)"
    if name.startswith(("vision_tower.", "mm_projector.")):
        return " (vision is not supported by this version)"
    return ""


def _assemble(name, variable, own: list[Placement], reader: _Reader, dtype) -> jax.Array:
    """Stack the released tensors of one variable."""
    shape = variable.shape
    array, keep = None, variable.get_metadata().get("keep_float32", False)
    keep = keep or not isinstance(variable, nnx.Param)
    for placement in own:
        stored = reader.read(placement.released)
        if array is None:
            wanted = np.float32 if keep else (dtype or stored.dtype)
            array = np.empty(shape, jnp.dtype(wanted))
        array[placement.index] = _to_ours(placement, stored, shape[len(placement.index) :])
    assert array is not None, name
    return jnp.asarray(array)


def _to_ours(placement: Placement, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The stored tensor as our array of `shape`."""
    if placement.layout == "matrix":
        return stored.reshape(stored.shape[0], -1).T.reshape(shape)
    if placement.layout == "decay":
        flat = stored.reshape(-1)
        tail = flat[shape[0] :]
        if np.any(tail != 0):
            raise ValueError(
                f"{placement.released}: entries from {shape[0]} on must be zero padding, found "
                f"{tail[tail != 0][0]}; the decay is one value per head"
            )
        return flat[: shape[0]]
    return stored.reshape(shape)
