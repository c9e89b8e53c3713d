"""Everything a training run is told, as frozen dataclasses that are also the command line."""

import dataclasses
import math
import types
import typing
from pathlib import Path

from k3jax.config.hf import read_json
from k3jax.errors import UserError
from k3jax.ops.parallel import Parallel
from k3jax.train.machines import ChecksConfig, ClusterConfig, MeshConfig
from k3jax.train.precision import PrecisionConfig

# What `k3jax resume` may change: nothing that alters what has been computed so far.
DEFAULT_PICTURES = 0.25
PROFILE_WARM_UP = 2  # steps before the recorded ones
RESUMABLE = (
    *("steps", "max_skipped", "profile", "checkpoint.", "evaluation.", "data.path"),
    *("mesh.", "distributed", "cluster.", "checks.", "compile_cache"),
    *("parallel.transport", "parallel.node_size", "parallel.expert_chunks"),
    *("parallel.attention", "parallel.context_layout"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """A cosine schedule after a linear warm-up, and what is done with the gradient."""

    rule: typing.Literal["adamw", "momentum"] = "adamw"
    """AdamW, or one moment per matrix and a step along it, which is what Muon keeps and moves
    without its orthogonalisation; vectors and tables stay with AdamW."""
    peak_lr: float = 3e-3
    """Learning rate at the end of the warm-up."""
    final_lr_fraction: float = 0.05
    """Learning rate at the last step, as a fraction of the peak."""
    warmup_steps: int = 60
    """Steps of linear warm-up; at most half of the run."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled decay, on matrices only."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient."""

    def __post_init__(self):
        for name in ("peak_lr", "clip_norm", "eps"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise UserError(f"optimizer.{name}={value} must be finite and above 0")
        if not 0 <= self.final_lr_fraction <= 1:
            raise UserError(f"optimizer.final_lr_fraction={self.final_lr_fraction} not in [0, 1]")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer.{name}={getattr(self, name)} must be in [0, 1)")
        for name in ("warmup_steps", "weight_decay"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise UserError(f"optimizer.{name}={value} must be finite and not negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalancingConfig:
    """What keeps the load of the routed experts even."""

    rule: typing.Literal["quantile", "sign", "aux", "none"] = "quantile"
    """Quantile Balancing, or for comparison a bias that moves by a fixed rate, a loss beside the
    training loss, or nothing."""
    sign_rate: float = 1e-3
    """Step of the biases under the rule `sign`."""
    aux_weight: float = 1e-2
    """Weight of the loss of the rule `aux`, summed over layers."""

    def __post_init__(self):
        for name in ("sign_rate", "aux_weight"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise UserError(f"balancing.{name}={value} must be finite and above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on."""

    path: str | None = None
    """Folder of UTF-8 text; by default the source of Python's standard library."""
    held_out_fraction: float = 0.06
    """Share of the bytes kept for evaluation, split by file."""
    pictures: float | None = None
    """Share of the rows that show words of the text as pictures; by default 0.25 where the model
    sees, else 0."""
    digits: float = 0.0
    """Share of the rows with handwritten digits (needs the extra k3jax[digits])."""

    def shares(self, sees: bool) -> dict[str, float]:
        """Source -> share of the rows, for a model that sees or does not.

        Raises:
            UserError: shares outside [0, 1], or pictures for a model without vision.
        """
        pictures = self.pictures
        if pictures is None:
            pictures = DEFAULT_PICTURES if sees else 0.0
        for name, share in (("pictures", pictures), ("digits", self.digits)):
            if not 0 <= share <= 1 or abs(round(share, 3) - share) > 1e-9:
                raise UserError(f"data.{name}={share} must be in [0, 1], in steps of 0.001")
            if share and not sees:
                raise UserError(f"data.{name}={share}, but this model has no vision tower")
        text = round(1 - pictures - self.digits, 6)
        if text < 0:
            raise UserError(
                f"data.pictures={pictures} and data.digits={self.digits} leave {text} for text"
            )
        return {"text": text, "pictures": pictures, "digits": self.digits}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often the state is saved."""

    every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 3
    """How many of the newest stay on disk."""

    def __post_init__(self):
        if self.every < 1:
            raise UserError(f"checkpoint.every={self.every} must be at least 1")
        if self.keep < 2:
            raise UserError(
                f"checkpoint.keep={self.keep} must be at least 2: the older one is used when the "
                "newest is damaged"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out measurements and samples."""

    every: int = 100
    """Steps between measurements on the small sample; 0 measures only at the end."""
    num_bytes: int = 16384
    """Size of the small sample."""
    final_num_bytes: int = 131072
    """Size of the sample of the final number, baselines included; 0 takes all held-out text."""
    sample_bytes: int = 200
    """Bytes to generate per prompt at the end; 0 writes no samples."""

    def __post_init__(self):
        for name in ("every", "num_bytes", "final_num_bytes", "sample_bytes"):
            if getattr(self, name) < 0:
                raise UserError(f"evaluation.{name}={getattr(self, name)} must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    model: str = "tiny"
    """Preset (tiny, small), or the path of a config.json."""
    name: str | None = None
    """Name of the run directory; by default the model's, numbered when it exists."""
    runs: str = "runs"
    """Folder of run directories."""
    overwrite: bool = False
    """Delete a run directory of the same name first."""
    steps: int = 580
    """Optimizer steps."""
    batch: int = 4
    """Rows per step, over all micro-batches and processes."""
    length: int = 512
    """Tokens per row."""
    micro_batches: int = 1
    """Parts a batch is computed in, one after the other; gradients are added in float32."""
    remat: typing.Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes instead of storing."""
    seed: int = 0
    """Seed of initial weights, order of the data, and samples."""
    max_skipped: int = 10
    """Stop after this many steps in a row with a non-finite loss or gradient."""
    profile: int = 0
    """Record a profile of this many steps, after two steps of warm-up; evaluations and
    checkpoints that fall among them follow after."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    balancing: BalancingConfig = dataclasses.field(default_factory=BalancingConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    distributed: bool = False
    """Compute with other processes, each started with this command on its own host."""
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    checks: ChecksConfig = dataclasses.field(default_factory=ChecksConfig)
    compile_cache: str | None = None
    """Folder of compiled programs, so that the next start is quicker; `off` keeps none. By default
    k3jax/compiled below the user's cache folder."""

    def __post_init__(self):
        for field in ("steps", "batch", "micro_batches", "max_skipped"):
            if getattr(self, field) < 1:
                raise UserError(f"{field}={getattr(self, field)} must be at least 1")
        if self.length < 2:
            raise UserError(f"length={self.length} must be at least 2")
        if self.batch % self.micro_batches:
            raise UserError(
                f"batch={self.batch} must be divisible by micro_batches={self.micro_batches}"
            )
        if not 0 <= self.seed < 1 << 32:
            raise UserError(f"seed={self.seed} must be in 0..{(1 << 32) - 1}")
        if self.profile < 0:
            raise UserError(f"profile={self.profile} must be 0 (off) or a number of steps")
        if self.profile and self.profile + PROFILE_WARM_UP > self.steps:
            raise UserError(
                f"profile={self.profile} needs {self.profile + PROFILE_WARM_UP} steps with those "
                f"of warm-up; raise steps={self.steps}"
            )
        if Path(self.runs).is_file():
            raise UserError(f"runs={self.runs} is a file; name a folder")
        if self.name is not None and (not self.name or "/" in self.name or self.name[0] == "."):
            raise UserError(f"name={self.name!r} must be a folder name; --runs takes a path")


PRESETS = {
    "tiny": TrainConfig(),
    "small": TrainConfig(
        model="small",
        steps=20000,
        batch=64,
        length=2048,
        micro_batches=4,
        remat="dots",
        optimizer=OptimizerConfig(peak_lr=1e-3, warmup_steps=200),
        checkpoint=CheckpointConfig(every=500),
        evaluation=EvaluationConfig(every=500, num_bytes=1 << 18, final_num_bytes=0),
    ),
}


def preset(model: str) -> TrainConfig:
    """Defaults for a model: those of the preset of that name, else those of `tiny`."""
    return PRESETS.get(model, dataclasses.replace(PRESETS["tiny"], model=model))


def to_dict(config: TrainConfig) -> dict:
    """Nested dictionary for `config.json`, the same from every process.

    How the processes of one start found each other is left out: the next start says it anew.
    """
    cluster = dataclasses.replace(
        config.cluster, coordinator=None, num_processes=None, process_id=None
    )
    return dataclasses.asdict(dataclasses.replace(config, distributed=False, cluster=cluster))


def from_dict(values: dict, cls: type = TrainConfig):
    """Inverse of `to_dict`.

    Raises:
        UserError: a field is unknown (another version wrote the file) or has another type.
    """
    hints = typing.get_type_hints(cls)
    unknown = sorted(values.keys() - hints.keys())
    if unknown:
        raise UserError(f"{cls.__name__} has no field {unknown[0]!r}; it has {sorted(hints)}")
    built = {}
    for name, value in values.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise UserError(f"{cls.__name__}.{name}={value!r} must be a table")
            value = from_dict(value, hint)
        elif not _fits(value, hint):
            raise UserError(f"{cls.__name__}.{name}={value!r} is not of type {hint}")
        built[name] = value
    return cls(**built)


def _fits(value, hint) -> bool:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def differences(old: TrainConfig, new: TrainConfig) -> dict[str, tuple]:
    """Dotted field -> (old value, new value) where two configurations differ."""
    result = {}

    def walk(a, b, prefix):
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if dataclasses.is_dataclass(x):
                walk(x, y, f"{prefix}{field.name}.")
            elif x != y:
                result[prefix + field.name] = (x, y)

    walk(old, new, "")
    return result


def check_overrides(old: TrainConfig, new: TrainConfig) -> dict[str, tuple]:
    """The changes from a run's own configuration, all of them allowed on resume.

    Raises:
        UserError: a field that decides what was computed differs.
    """
    changed = differences(old, new)
    allowed = ", ".join(name.rstrip(".") for name in RESUMABLE)
    for name, (was, now) in changed.items():
        if not name.startswith(RESUMABLE):
            raise UserError(
                f"{name}={now!r} differs from the run's {was!r} and cannot change on resume "
                f"(only {allowed} can); start a new run with k3jax train"
            )
    return changed


def resolve_model(name: str):
    """The `K3Config` of a preset name or of a config.json (or its folder).

    Raises:
        UserError: neither.
    """
    from k3jax.config import K3Config

    if name in PRESETS:
        return getattr(K3Config, name)()
    path = Path(name)
    if path.exists():
        described = read_json(path / "config.json" if path.is_dir() else path)
        if isinstance(described, dict) and isinstance(described.get("model"), dict):  # of a run
            return K3Config.from_hf_dict(described["model"])
        return K3Config.from_hf(name)
    raise UserError(
        f"model={name!r} is neither a preset ({', '.join(PRESETS)}) nor an existing config.json"
    )
