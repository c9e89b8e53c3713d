"""Small checkpoints in the released layout, written for one test."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from k3jax.checkpoint.headers import read_header
from k3jax.checkpoint.names import placements
from k3jax.config import K3Config
from tests.golden_cases import GOLDEN


def random_tensors(cfg: K3Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Noise under the released names; the decay is padded with zeros to the head width."""
    random = np.random.default_rng(seed)
    tensors = {}
    for placement in placements(cfg):
        name, shape = placement.released, placement.shape
        z = random.standard_normal(shape).astype(np.float32)
        if "norm.weight" in name:
            z = 1 + 0.2 * z
        elif name.endswith("A_log"):
            z = np.zeros(max(cfg.kda.head_dim, cfg.kda.num_heads), np.float32)
            z[: cfg.kda.num_heads] = 0.5 * random.standard_normal(cfg.kda.num_heads)
        elif name.endswith("e_score_correction_bias"):
            z = 0.1 * z
        elif name.endswith("embed_tokens.weight"):
            pass
        elif name.endswith("res_proj.weight"):
            z = 0.3 * z
        elif "conv1d" in name:
            z = 0.5 * z
        elif len(shape) == 2:
            z = 1.2 * shape[1] ** -0.5 * z
        tensors[name] = z
    return tensors


def write_checkpoint(
    folder: Path, cfg: K3Config, tensors: dict, *, prefix: str = "", shards: int = 1
) -> Path:
    """`config.json` and the tensors: one file, or several behind an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(cfg.to_hf()))
    tensors = {prefix + name: np.ascontiguousarray(t) for name, t in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def stored_bytes(folder: Path) -> dict[str, tuple]:
    """Stored name -> type, shape and raw bytes of every tensor of a folder's safetensors files."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        content = file.read_bytes()
        for name, t in read_header(file).items():
            found[name] = (t.dtype, t.shape, content[t.offset : t.offset + t.num_bytes])
    return found


def copy_checkpoint(case: str, target: Path) -> Path:
    """The checkpoint of a golden case alone, without the expected outputs."""
    target.mkdir(parents=True)
    for file in (GOLDEN / case).iterdir():
        if file.name.startswith(("model", "config")):
            shutil.copy(file, target)
    return target
