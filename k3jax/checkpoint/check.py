"""Whether the tensors of a folder are those of its configuration; all faults at once."""

import concurrent.futures
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from k3jax.checkpoint.errors import show_name
from k3jax.checkpoint.folder import VISION_PREFIXES, CheckpointFolder
from k3jax.checkpoint.placement import Placement
from k3jax.checkpoint.tensors import RowTensor, read_whole
from k3jax.config import K3Config
from pallas_kernels.mxfp4 import GROUP

FLOATS = ("BF16", "F16", "F32")
NAN_SCALE = 255


def find_header_faults(
    folder: CheckpointFolder, cfg: K3Config, expected: dict[str, Placement]
) -> list[str]:
    """Missing, unknown, misshaped and wrongly typed tensors, from the headers alone."""
    faults = [_missing(folder, name) for name in expected if name not in folder.tensors]
    faults += [
        f"unknown: {show_name(name)}{_hint(name, folder, cfg)}"
        for name in folder.tensors
        if name not in expected
    ]
    faults += [
        f"unknown: {show_name(name)}, which the index puts into {file} but which is not there"
        for name, file in folder.misplaced.items()
        if name not in expected
    ]
    for name, placement in expected.items():
        if name in folder.tensors:
            faults += tensor_faults(folder, placement)
    return faults + list(_width_faults(folder, cfg)) + list(_quantization_faults(folder, cfg))


def find_value_faults(
    tensors: dict[str, RowTensor], expected: dict[str, Placement], workers: int
) -> list[str]:
    """Decay tensors whose padding is not zero, and scale bytes that mean NaN."""

    def check(name: str) -> str | None:
        if expected[name].layout == "decay":
            return decay_fault(name, read_whole(tensors[name]), expected[name].num_heads)
        return scale_fault(name, read_whole(tensors[name]))

    names = [name for name, p in expected.items() if p.layout == "decay" or is_scale(p.released)]
    return _map_faults(check, names, workers)


def is_scale(name: str) -> bool:
    """Whether this is the name of MXFP4 scales."""
    return name.endswith(".weight_scale")


def decay_fault(name: str, stored: np.ndarray, num_heads: int) -> str | None:
    """What is wrong with a stored decay."""
    tail = stored.reshape(-1)[num_heads:]
    if not np.any(tail != 0):
        return None
    return (
        f"value: {name}: entries from {num_heads} on must be zero padding, found "
        f"{tail[tail != 0][0]}; the decay is one value per head"
    )


def scale_fault(name: str, scales: np.ndarray) -> str | None:
    """What is wrong with stored scales [out, in/32]."""
    is_nan = scales == NAN_SCALE
    if not is_nan.any():
        return None
    row, group = (int(i) for i in np.argwhere(is_nan.reshape(len(scales), -1))[0])
    return (
        f"value: {name}: {int(is_nan.sum())} scale bytes are 255, which means NaN; "
        f"the first at row {row}, group {group}"
    )


def _map_faults(check: Callable[[str], str | None], names, workers: int) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return [fault for fault in pool.map(check, names) if fault is not None]


def _missing(folder: CheckpointFolder, name: str) -> str:
    if name in folder.misplaced:
        return f"missing: {name} is not in {folder.misplaced[name]}, where the index puts it"
    return f"missing: {name}"


def _hint(name: str, folder: CheckpointFolder, cfg: K3Config) -> str:
    if name.startswith(VISION_PREFIXES) and cfg.vision is None:
        return " (vision is not supported without a vision_config in config.json)"
    if ".experts." in name and name.endswith(".weight") and folder.is_packed:
        return " (the other experts are packed)"
    return ""


def tensor_faults(folder: CheckpointFolder, placement: Placement) -> Iterator[str]:
    """What the header of one stored tensor has wrong."""
    name = placement.released
    stored = folder.tensors[name]
    wanted = placement.dtype if placement.dtype == "U8" else "floating point"
    if not placement.matches(stored.shape):
        shape = (placement.num_heads,) if placement.layout == "decay" else placement.shape
        yield f"shape: {name} is {list(stored.shape)}, expected {list(shape)}"
    elif stored.dtype != "U8" if wanted == "U8" else stored.dtype not in FLOATS:
        allowed = "U8" if wanted == "U8" else f"{wanted} ({', '.join(FLOATS)})"
        yield f"type: {name} is {stored.dtype}, expected {allowed}"


def _width_faults(folder: CheckpointFolder, cfg: K3Config) -> Iterator[str]:
    """Packed experts with a part of a group at the end of their rows."""
    if not folder.is_packed or cfg.moe is None:
        return
    widths = {
        "latent_dim" if cfg.moe.latent_dim else "dim": cfg.moe.latent_dim or cfg.dim,
        "expert_hidden_dim": cfg.moe.expert_hidden_dim,
    }
    for name, width in widths.items():
        if width % GROUP:
            yield (
                f"shape: packed experts have an input width of {width} ({name}), which is no "
                f"multiple of {GROUP}, the group that shares a scale in MXFP4"
            )


def _quantization_faults(folder: CheckpointFolder, cfg: K3Config) -> Iterator[str]:
    """Packed experts in a form that config.json describes and this version does not read."""
    described = quantization_config(cfg)
    if not folder.is_packed or described is None:
        return
    found = {"format": described.get("format")}
    groups = described.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            found |= {key: weights.get(key) for key in ("num_bits", "group_size", "type")}
    readable = {"format": "mxfp4-pack-quantized", "num_bits": 4, "group_size": GROUP}
    readable["type"] = "float"
    for key, value in found.items():
        if value != readable[key]:
            yield (
                f"type: config.json says quantization_config {key}={value!r}; packed experts "
                f"must have {readable[key]!r}"
            )


def quantization_config(cfg: K3Config) -> dict[str, Any] | None:
    """The `quantization_config` of the config.json that `cfg` was read from."""
    document = json.loads(cfg.source_json) if cfg.source_json else {}
    for section in (document.get("text_config"), document):
        if isinstance(section, dict) and isinstance(section.get("quantization_config"), dict):
            return section["quantization_config"]
    return None
