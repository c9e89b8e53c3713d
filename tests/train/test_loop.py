"""A run from start to end, resumed, and with a damaged checkpoint."""

import dataclasses
import json

import pytest

from k3jax.config import K3Config
from k3jax.data.corpus import load_corpus
from k3jax.errors import UserError
from k3jax.train.config import CheckpointConfig, DataConfig, EvaluationConfig, TrainConfig
from k3jax.train.loop import Trainer, new_trainer
from k3jax.train.metrics import read_metrics
from k3jax.train.run_directory import RunDirectory


@pytest.fixture
def config(tmp_path):
    """Four layers of `tiny`, on a small text of the test's own."""
    cfg = K3Config.tiny()
    cfg = dataclasses.replace(
        cfg,
        num_layers=2,
        kda_layers=(1,),
        full_attention_layers=(2,),
        attention_residual_block=1,
    )
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_hf()))
    text = tmp_path / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i}.txt").write_text("".join(f"line {j} of file {i}\n" for j in range(40)))
    return TrainConfig(
        model=str(tmp_path / "config.json"),
        name="run",
        runs=str(tmp_path / "runs"),
        steps=5,
        batch=2,
        length=64,
        data=DataConfig(path=str(text)),
        checkpoint=CheckpointConfig(every=2),
        evaluation=EvaluationConfig(every=0, num_bytes=256, final_num_bytes=256),
    )


def _losses(run):
    return [(r["step"], r["loss"]) for r in read_metrics(run.metrics_file) if r["kind"] == "train"]


def _reopen(path):
    run = RunDirectory.open(path)
    config = run.train_config()
    corpus = load_corpus(config.data.path, held_out_fraction=config.data.held_out_fraction)
    notes = []
    return Trainer(config, run, corpus, notes.append), notes


def test_resumed_run_continues_identically_also_after_a_damaged_checkpoint(config):
    trainer = new_trainer(config, print)
    assert trainer.train()
    whole = _losses(trainer.run)
    assert [step for step, _ in whole] == [1, 2, 3, 4, 5]
    table = trainer.final_evaluation()
    assert set(table) == {"model", "unigram", "bigram", "trigram"}
    trainer.checkpoints.close()
    trainer.run.close()

    newest = max(trainer.run.checkpoints.glob("[0-9]*"), key=lambda p: int(p.name))
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])

    again, notes = _reopen(trainer.run.path)
    assert again.restore() == 4
    assert "damaged" in notes[0]
    assert again.train()
    assert _losses(again.run) == whole
    again.checkpoints.close()
    again.run.close()

    with pytest.raises(UserError, match="--overwrite"):
        new_trainer(config, print)
