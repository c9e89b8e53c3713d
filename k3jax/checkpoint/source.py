"""A released checkpoint that has been opened and found whole."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from k3jax.checkpoint.check import find_header_faults, find_value_faults, tensor_faults
from k3jax.checkpoint.errors import CheckpointError, list_faults
from k3jax.checkpoint.folder import CheckpointFolder, FileReader, open_folder
from k3jax.checkpoint.names import placements, with_decay_shape
from k3jax.checkpoint.placement import Placement
from k3jax.checkpoint.tensors import DecodedTensor, FileTensor, RowTensor, cast, encoded_pair
from k3jax.config import K3Config
from k3jax.errors import UserError
from pallas_kernels.mxfp4 import GROUP, RULES

Experts = Literal["auto", "packed", "dequantized"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Tensors of a model under their released names.

    Attributes:
        cfg: the model.
        packed: whether routed experts are codes and scales.
        placements: released name -> placement.
        tensors: released name -> tensor; the same names.
    """

    cfg: K3Config
    packed: bool
    placements: dict[str, Placement]
    tensors: dict[str, RowTensor]


def num_workers() -> int:
    """Threads that read, transpose and write at the same time."""
    return max(2, min(8, os.cpu_count() or 2))


@contextlib.contextmanager
def open_source(path: str | Path) -> Iterator[Source]:
    """Open a folder in the released layout and check everything that headers can tell.

    A configuration with a vision part but a folder without any tensor of it is a text model: a
    warning says so.

    Raises:
        FileNotFoundError, ConfigError, CheckpointError: see `k3jax.load_hf`.
    """
    cfg = K3Config.from_hf(path)
    folder = open_folder(path)
    if folder.faults:
        raise CheckpointError(";\n".join(folder.faults))
    if cfg.vision is not None and not folder.has_vision:
        warnings.warn(
            f"{path}: config.json describes a vision tower but no tensor of it is stored; "
            "loading the text model alone",
            stacklevel=4,
        )
        cfg = dataclasses.replace(cfg, vision=None)
    expected = {p.released: p for p in placements(cfg, packed=folder.is_packed)}
    faults = find_header_faults(folder, cfg, expected)
    with FileReader() as reader:
        tensors: dict[str, RowTensor] = {
            name: FileTensor(reader, folder.tensors[name])
            for name in expected
            if name in folder.tensors and not any(tensor_faults(folder, expected[name]))
        }
        faults += find_value_faults(
            tensors, {name: expected[name] for name in tensors}, num_workers()
        )
        if faults:
            raise CheckpointError(f"{path}: {len(faults)} tensors do not fit:{list_faults(faults)}")
        cfg = _with_stored_decay(cfg, folder, expected)
        yield Source(cfg=cfg, packed=folder.is_packed, placements=expected, tensors=tensors)


def _with_stored_decay(cfg: K3Config, folder: CheckpointFolder, expected) -> K3Config:
    decays = (name for name, p in expected.items() if p.layout == "decay")
    first = next(decays, None)
    return cfg if first is None else with_decay_shape(cfg, folder.tensors[first].shape)


def resolve_experts(experts: str, packed: bool) -> bool:
    """Whether routed experts shall be packed, when they are (`packed`) or are not now.

    Raises:
        UserError: not one of the three.
    """
    choices = {"auto": packed, "packed": True, "dequantized": False}
    if experts not in choices:
        raise UserError(f"experts={experts!r} must be one of {', '.join(choices)}")
    return choices[experts]


def convert_source(
    source: Source, *, experts: str = "auto", rule: str = "even", dtype: np.dtype | None = None
) -> Source:
    """The same model with its experts in another form, and its bfloat16 tensors in `dtype`.

    Args:
        source: where the tensors come from; they are converted as they are read.
        experts: "auto" keeps the form.
        rule: scale rule of the quantiser.
        dtype: type of what the release stores in bfloat16; None keeps the type of each tensor.
            Decoded experts are bfloat16 then, which holds them exactly.

    Raises:
        UserError: an unknown choice, or experts that cannot be packed.
    """
    if rule not in RULES:
        raise UserError(f"rule={rule!r} must be one of {', '.join(RULES)}")
    packed = resolve_experts(experts, source.packed)
    wanted = {p.released: p for p in placements(source.cfg, packed=packed)}
    tensors: dict[str, RowTensor] = {}
    for name, placement in wanted.items():
        if name in tensors:
            continue
        if name in source.tensors:
            tensors[name] = source.tensors[name]
        elif packed:
            stem = name.removesuffix("_packed")
            matrix = source.tensors[stem]
            if matrix.shape[1] % GROUP:
                raise UserError(
                    f"{stem} {list(matrix.shape)} has an input width of {matrix.shape[1]}, which "
                    f"is no multiple of {GROUP}, the group that shares a scale in MXFP4; use "
                    "experts='dequantized'"
                )
            tensors[f"{stem}_packed"], tensors[f"{stem}_scale"] = encoded_pair(matrix, rule)
        else:
            pair = (source.tensors[f"{name}_packed"], source.tensors[f"{name}_scale"])
            tensors[name] = DecodedTensor(*pair)
        if dtype is not None and placement.dtype == "BF16":
            tensors[name] = cast(tensors[name], dtype)
    return Source(
        cfg=source.cfg,
        packed=packed,
        placements=wanted,
        tensors={name: tensors[name] for name in wanted},
    )
