"""Options that cannot work are refused before anything is read or deleted."""

import dataclasses
import json

import pytest

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
    resolve_model,
)
from k3jax.train.metrics import cut_metrics, read_metrics


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (OptimizerConfig, {"peak_lr": float("nan")}),
        (OptimizerConfig, {"peak_lr": 0.0}),
        (OptimizerConfig, {"eps": -1.0}),
        (OptimizerConfig, {"beta1": 1.0}),
        (OptimizerConfig, {"beta2": -0.1}),
        (OptimizerConfig, {"weight_decay": -3.0}),
        (OptimizerConfig, {"warmup_steps": -5}),
        (OptimizerConfig, {"clip_norm": float("inf")}),
        (OptimizerConfig, {"final_lr_fraction": 1.5}),
        (EvaluationConfig, {"every": -1}),
        (EvaluationConfig, {"num_bytes": -5}),
        (EvaluationConfig, {"final_num_bytes": -5}),
        (EvaluationConfig, {"sample_bytes": -5}),
        (CheckpointConfig, {"every": 0}),
        (CheckpointConfig, {"keep": 1}),
        (TrainConfig, {"seed": -1}),
        (TrainConfig, {"seed": 1 << 32}),
        (TrainConfig, {"steps": 10, "profile": 9}),
        (TrainConfig, {"length": 1}),
        (TrainConfig, {"batch": 3, "micro_batches": 2}),
    ],
)
def test_values_out_of_range_are_named(cls, values):
    name, value = list(values.items())[-1]
    expected = "batch=3" if name == "micro_batches" else f"{name}={value}"
    with pytest.raises(UserError) as error:
        cls(**values)
    assert expected in str(error.value)


def test_a_file_is_no_folder_of_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; name a folder"):
        TrainConfig(runs=str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pictures": 1.5}, "data.pictures=1.5 must be in"),
        ({"digits": -0.1}, "data.digits=-0.1 must be in"),
        ({"pictures": 0.0005}, "data.pictures=0.0005 must be .* in steps of 0.001"),
        ({"pictures": 0.7, "digits": 0.6}, "leave -0.3 for text"),
    ],
)
def test_shares_that_do_not_fit(options, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**options).shares(sees=True)


def test_shares_by_default_and_for_a_model_without_vision():
    assert DataConfig().shares(sees=True) == {"text": 0.75, "pictures": 0.25, "digits": 0.0}
    assert DataConfig().shares(sees=False) == {"text": 1.0, "pictures": 0.0, "digits": 0.0}
    with pytest.raises(UserError, match="this model has no vision tower"):
        DataConfig(pictures=0.1).shares(sees=False)


def test_the_config_of_a_run_names_a_model(tmp_path):
    cfg = dataclasses.replace(K3Config.tiny(), dim=64)
    (tmp_path / "config.json").write_text(json.dumps({"model": cfg.to_hf(), "train": {}}))
    assert resolve_model(str(tmp_path)).dim == 64
    assert resolve_model(str(tmp_path / "config.json")).dim == 64


def test_the_final_measurement_of_a_run_that_goes_on_is_kept(tmp_path):
    file = tmp_path / "metrics.jsonl"
    records = [{"kind": "train", "step": 1}, {"kind": "final", "step": 1, "held_out": 2.0}]
    file.write_text("".join(json.dumps(r) + "\n" for r in [*records, {"kind": "train", "step": 2}]))
    cut_metrics(file, 1)
    assert read_metrics(file) == [records[0], records[1] | {"kind": "evaluation"}]
