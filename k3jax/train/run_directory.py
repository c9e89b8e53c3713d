"""`runs/<name>/`: created once, never overwritten unasked, described by its config.json."""

import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.train import config as train_config
from k3jax.train.config import TrainConfig
from k3jax.train.machines import MeshConfig

PACKAGES = ("k3jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class RunDirectory:
    """Paths of one run, and the lock that keeps a second process out.

    Use `create` or `open`; `close` gives the lock back.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.plots = self.path / "plots"
        self.pictures = self.path / "pictures"
        self.samples_file = self.path / "samples.txt"
        self.report_file = self.path / "report.html"
        self.profile = self.path / "profile"
        self._lock = None

    @classmethod
    def create(cls, config: TrainConfig, model: K3Config, corpus: dict) -> "RunDirectory":
        """Make the directory and write config.json.

        Raises:
            UserError: the name is taken and `overwrite` is not set, or it is no run directory.
        """
        run = cls(choose_path(config))
        if run.path.exists():
            run._check_replaceable()
            run._take_lock()  # a run that still trains there is never deleted
            shutil.rmtree(run.path)
        run.path.mkdir(parents=True)
        run._take_lock()
        run.plots.mkdir()
        run.write_config(
            {
                "created": _now(),
                "train": train_config.to_dict(config),
                "model": model.to_hf(),
                "preset": {"name": config.model, "version": importlib.metadata.version("k3jax")},
                "corpus": corpus,
                "environment": environment(config.mesh),
                "resumed": [],
            }
        )
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """An existing run.

        Raises:
            UserError: there is none, its config.json is unreadable, or another process uses it.
        """
        run = cls(Path(path))
        run.read_config()
        run._take_lock()
        return run

    def _check_replaceable(self) -> None:
        """Refuse to delete what no training run wrote."""
        if not self.path.is_dir():
            raise UserError(f"{self.path} is a file; choose another --name or --runs")
        if not any(self.path.iterdir()):
            return
        try:
            self.read_config()
        except UserError as error:
            raise UserError(
                f"{self.path} is not empty and holds no run ({error}); choose another --name"
            ) from error

    def read_config(self, *, training: bool = True) -> dict:
        """The contents of config.json.

        Args:
            training: only a run that was trained will do; False also reads one that was converted
                from a released checkpoint.

        Raises:
            UserError: missing or not the file of a run.
        """
        try:
            described = json.loads(self.config_file.read_text())
        except OSError as error:
            raise UserError(
                f"{self.path} is not a run directory: {self.config_file}: {error.strerror}"
            ) from error
        except ValueError as error:
            raise UserError(f"{self.config_file} is not JSON: {error}") from error
        if isinstance(described, dict) and "converted" in described:
            if not training:
                return described
            raise UserError(
                f"{self.path} was converted from a released checkpoint: it holds weights, but no "
                "optimizer state, data position or schedule to go on with; k3jax generate and "
                "k3jax convert can use it"
            )
        for key in ("train", "model", "corpus"):
            if not isinstance(described, dict) or not isinstance(described.get(key), dict):
                raise UserError(
                    f"{self.config_file} has no table {key!r}: not written by k3jax train (a "
                    "checkpoint in the released layout is loaded by k3jax.load_hf)"
                )
        described.setdefault("resumed", [])
        return described

    def write_config(self, described: dict) -> None:
        """Replace config.json atomically."""
        temporary = self.config_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(described, indent=2) + "\n")
        os.replace(temporary, self.config_file)

    def record_kernels(self) -> None:
        """Add to config.json which implementation of each kernel this process chose, and why."""
        from k3jax.ops import explain_kernels  # with jax, which reading a run does not need

        self.write_config(self.read_config() | {"kernels": explain_kernels().records()})

    def train_config(self) -> TrainConfig:
        """The configuration the run was started with, changes on resume included."""
        try:
            return train_config.from_dict(self.read_config()["train"])
        except UserError as error:
            raise UserError(f"{self.config_file}: {error}") from error

    def model_config(self) -> K3Config:
        """The model of the run."""
        return K3Config.from_hf_dict(self.read_config()["model"])

    def _take_lock(self) -> None:
        self.close()
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            self._lock = None
            raise UserError(f"{self.path} is in use by another process that trains it") from error

    def close(self) -> None:
        """Let other processes use the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def choose_path(config: TrainConfig) -> Path:
    """Where a new run goes: `runs/<name>`, or without a name the first free `runs/<model>[-n]`.

    Raises:
        UserError: the name given is taken and `overwrite` is not set.
    """
    runs = Path(config.runs)
    if config.name is None:
        base = Path(config.model).stem if config.model not in train_config.PRESETS else config.model
        path, number = runs / base, 1
        while path.exists() and not config.overwrite:
            number += 1
            path = runs / f"{base}-{number}"
        return path
    path = runs / config.name
    if path.exists() and not config.overwrite:
        raise UserError(
            f"{path} exists: continue it with `k3jax resume {path}`, choose another --name, "
            "or delete it with --overwrite"
        )
    return path


def versions() -> dict:
    """Interpreter, packages and commit."""
    return {
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def environment(mesh: MeshConfig) -> dict:
    """Versions, devices and mesh: what else decides the numbers of a run."""
    import jax

    return {
        **versions(),
        "platform": platform.platform(),
        "devices": {
            "backend": jax.default_backend(),
            "kind": jax.devices()[0].device_kind,
            "count": jax.device_count(),
            "processes": jax.process_count(),
            "cpu_cores": os.cpu_count(),
        },
        # One device: no mesh in force.
        "mesh": dataclasses.asdict(mesh) if mesh.num_devices > 1 else None,
    }


def _commit() -> str | None:
    """Commit of the source tree, marked when it has changes; None for an installed package."""
    folder = Path(__file__).parent
    try:
        run = lambda *args: subprocess.run(  # noqa: E731
            ["git", "-C", folder, *args], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        if not run("ls-files", Path(__file__).name):
            return None  # installed inside somebody else's repository
        return run("rev-parse", "HEAD") + ("-changed" if run("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
