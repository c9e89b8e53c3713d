"""A run's model, for use after or during training."""

import warnings
from collections.abc import Callable
from pathlib import Path

import jax

from k3jax.checkpoint.run import read_latest
from k3jax.errors import UserError
from k3jax.train.converted import STEP, ConvertedWeights
from k3jax.train.optimizer import make_optimizer
from k3jax.train.run_directory import RunDirectory
from k3jax.train.state import ModelParts, from_tree, to_tree, with_sharding


def load_run(path: str | Path, report: Callable[[str], None] = warnings.warn):
    """The model of a run's newest whole checkpoint. Changes nothing on disk.

    Args:
        path: run directory; it may be in training.
        report: told about each damaged checkpoint that was passed over; by default a warning.

    Raises:
        UserError: no run, or no usable checkpoint.
    """
    run = RunDirectory(Path(path))
    described = run.read_config(training=False)
    if "converted" in described:
        return ConvertedWeights(run.checkpoints / STEP, described).model()
    config = run.train_config()
    parts = ModelParts(run.model_config(), precision=config.precision)
    optimizer = make_optimizer(config.optimizer, parts.param_names, parts.matrix_names)
    abstract = parts.abstract_state(optimizer)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    try:
        found = read_latest(run.checkpoints, with_sharding(to_tree(abstract), sharding), report)
    except ValueError as error:
        raise UserError(str(error)) from error
    if found is None:
        raise UserError(f"{run.checkpoints} holds no usable checkpoint yet")
    state = from_tree(found.tree, abstract)
    return parts.join(state.params, state.rest)
