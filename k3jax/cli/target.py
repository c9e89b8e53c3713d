"""What a name on the command line points to: a preset, a file, a checkpoint or a run."""

import dataclasses
import difflib
from pathlib import Path
from typing import Literal

from k3jax.config import K3Config
from k3jax.config.hf import parse_config, read_json
from k3jax.config.presets import PRESETS
from k3jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A model configuration and where it came from; `folder` is None for a preset."""

    name: str
    kind: Literal["preset", "config file", "checkpoint", "run"]
    cfg: K3Config
    folder: Path | None


def resolve_target(name: str) -> Target:
    """Find the model that `name` names.

    Args:
        name: a preset (`-` and `_` are the same), a config.json, or the folder of a checkpoint
            or run. A run's config.json holds the model under the key "model". A file named like
            a preset is reached as `./NAME`.

    Raises:
        UserError: nothing of that name; the message lists the presets.
        ConfigError: the file cannot be read as a model.
    """
    preset = name.replace("-", "_")
    if preset in PRESETS:
        return Target(name=preset, kind="preset", cfg=PRESETS[preset](), folder=None)
    path = Path(name)
    if not path.exists():
        nearest = difflib.get_close_matches(preset, PRESETS, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise UserError(
            f"{name!r} is neither a preset ({', '.join(PRESETS)}) nor an existing config.json, "
            f"checkpoint folder or run directory.{hint}"
        )
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        inside = [p for p in file.absolute().parents if (p / "config.json").is_file()]
        hint = f"; it lies in {inside[0]}, name that" if inside else ""
        raise UserError(f"{path}: this folder has no config.json{hint}")
    document = read_json(file)
    if isinstance(document, dict) and isinstance(document.get("model"), dict):
        cfg = parse_config(document["model"], origin=f"{file} (key 'model')")
        return Target(name=name, kind="run", cfg=cfg, folder=file.parent)
    cfg = parse_config(document, origin=str(file))
    kind = "checkpoint" if path.is_dir() else "config file"
    return Target(name=name, kind=kind, cfg=cfg, folder=file.parent)
