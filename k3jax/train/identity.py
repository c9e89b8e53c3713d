"""What a checkpoint must agree on with the run that reads it."""

from k3jax.config import K3Config
from k3jax.data.corpus import Corpus
from k3jax.errors import UserError
from k3jax.train import config as config_module
from k3jax.train.config import TrainConfig


def identity(config: TrainConfig, model: K3Config, corpus: Corpus) -> dict:
    """JSON dictionary of all that decides the numbers of a run."""
    return {"train": what_counts(config), "model": model.to_hf(), "corpus": corpus.digest}


def what_counts(config: TrainConfig) -> dict:
    """The options that decide what is computed."""
    train = config_module.to_dict(config)
    free = ("checkpoint", "evaluation", "steps", "max_skipped", "profile")
    # Where it is computed: a mesh, processes and machines may change.
    free += ("mesh", "distributed", "cluster", "checks", "compile_cache")
    for name in (*free, "name", "runs", "overwrite"):  # a run directory may be moved
        del train[name]
    del train["data"]["path"]  # the text may be moved, its digest stays
    for name in config_module.RESUMABLE:
        if name.startswith("parallel."):
            del train["parallel"][name.removeprefix("parallel.")]
    return train


def check_identity(stored: dict, present: dict, path) -> None:
    """Compare what a checkpoint was trained with and what the run says.

    Raises:
        UserError: they differ; the first differing entry is named.
    """
    # What an older version had no option for was at its default.
    options = config_module.from_dict(stored["train"])
    stored = stored | {"train": what_counts(options)}
    old, new = dict(flat_entries(stored)), dict(flat_entries(present))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            hint = ""
            if name == "corpus":
                hint = ": the text changed since (another Python version, or edited files)"
            raise UserError(
                f"{path} holds checkpoints of another configuration: {name} was "
                f"{old.get(name)!r}, is {new.get(name)!r}{hint}"
            )


def flat_entries(values: dict, prefix: str = ""):
    """Dotted name and value of each entry of a nested dictionary."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat_entries(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
