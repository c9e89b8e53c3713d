"""A whole run, what it leaves behind, and how it continues."""

import dataclasses
import io
import json
import os
import shutil
import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from k3jax.checkpoint.run import stored_steps
from k3jax.errors import UserError
from k3jax.train import job
from k3jax.train.config import resolve_model
from k3jax.train.data import read_data
from k3jax.train.loop import Trainer
from k3jax.train.metrics import MetricsLog, cut_metrics, read_metrics
from k3jax.train.progress import Stopwatch
from k3jax.train.restore import load_run
from k3jax.train.run_directory import RunDirectory
from k3jax.train.samples import continue_prompts
from k3jax.train.stopping import Diverged, Interrupted
from tests.train.conftest import micro_config

PICTURES = {
    "loss", "optimization", "throughput", "balance", "expert_load", "router_bias", "decay_rates",
    "depth_attention", "reading", "pictures",
}  # fmt: skip


def quiet():
    return Console(file=io.StringIO(), width=120)


def losses(path):
    records = read_metrics(path / "metrics.jsonl")
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"]


def keep(config):
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(config, run path, what was printed) of one run to its end."""
    config = micro_config(tmp_path_factory.mktemp("job"))
    console = quiet()
    run = job.train(config, console)
    return config, run.path, console.file.getvalue()


def test_run_directory_is_complete(finished):
    config, path, printed = finished
    described = json.loads((path / "config.json").read_text())
    assert described["model"] == json.loads(Path(config.model).read_text())
    assert described["train"]["optimizer"]["peak_lr"] == config.optimizer.peak_lr
    assert {"python", "packages", "commit", "devices"} <= set(described["environment"])
    chosen = {(kernel["op"], kernel["implementation"]) for kernel in described["kernels"]}
    assert ("cross_entropy", "xla") in chosen
    assert all(kernel["reason"] for kernel in described["kernels"])
    assert {p.stem for p in (path / "plots").iterdir()} == PICTURES
    assert stored_steps(path / "checkpoints") == [2, 4, 6]
    page = (path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(PICTURES)
    assert "http" not in page.replace(str(path), "")
    assert (path / "samples.txt").read_text().count("--- prompt") == 3  # held-out documents
    assert len(list((path / "pictures").glob("*.png"))) > 0
    for words in ("this model", "interpolated trigram", "where the time went", "k3jax generate"):
        assert words in printed


@pytest.mark.slow
def test_a_run_reads_pictures_that_it_kept(finished):
    _, path, _ = finished
    pictures = sorted((path / "pictures").glob("*.png"))[:1]
    model = load_run(path)
    texts = [
        continue_prompts(model, ["a", ""], pictures=shown, num_bytes=3, temperature=0.0)
        for shown in (pictures, pictures, [])
    ]
    assert texts[0] == texts[1]
    assert all(len(pair) == 2 for pair in texts)


def test_metrics_have_each_step_once_and_the_same_bytes_for_all(finished):
    _, path, _ = finished
    records = read_metrics(path / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if r["kind"] == "evaluation"] == [3]
    (final,) = [r for r in records if r["kind"] == "final"]
    assert set(final["baselines"]) == {"unigram", "bigram", "trigram"}
    assert 200 < final["held_out_bytes"] <= 6 * 48  # rows of 48 tokens
    assert final["picture_share"] == 0.25
    assert final["picture_bytes"] > 0
    assert final["picture_bits_per_byte"] > 0 and final["swapped_picture_bits_per_byte"] > 0
    assert np.array(final["expert_counts"]).shape == (1, 4)


def test_resume_after_a_damaged_checkpoint_gives_the_same_curve(finished, tmp_path):
    _, path, _ = finished
    expected = losses(path)
    files = [p for p in (path / "checkpoints" / "6").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:20])
    console = quiet()
    job.resume(str(path), keep, console)
    assert "checkpoint 6 is damaged" in console.file.getvalue()
    assert "continuing from the checkpoint of step 4" in console.file.getvalue()
    assert losses(path) == expected
    assert len(json.loads((path / "config.json").read_text())["resumed"]) == 1


def test_resume_checks_overrides_and_text(finished):
    _, path, _ = finished

    def change(**changes):
        return lambda old: dataclasses.replace(old, **changes)

    with pytest.raises(UserError, match=r"batch=8 differs from the run's 4.*start a new run"):
        job.resume(str(path), change(batch=8), quiet())
    with pytest.raises(UserError, match="steps=3 is below the 6 steps done"):
        job.resume(str(path), change(steps=3), quiet())
    with pytest.raises(UserError, match="is not a run directory"):
        job.resume(str(path.parent), keep, quiet())
    text = path.parent.parent / "text" / "0.txt"
    before = text.read_text()
    text.write_text("edited")
    with pytest.raises(UserError, match="another configuration: corpus was"):
        job.resume(str(path), keep, quiet())
    text.write_text(before)


def test_checkpoints_of_another_run_are_refused(finished, tmp_path):
    _, path, _ = finished
    described = json.loads((path / "config.json").read_text())
    described["train"]["optimizer"]["peak_lr"] = 0.5
    other = tmp_path / "other"
    other.mkdir()
    (other / "checkpoints").symlink_to(path / "checkpoints")
    (other / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"train\.optimizer\.peak_lr was 0.003, is 0.5"):
        job.resume(str(other), keep, quiet())


def test_taken_name_is_refused_and_default_names_are_numbered(finished):
    config, path, _ = finished
    with pytest.raises(UserError, match=r"exists: continue it with .k3jax resume.*--overwrite"):
        job.train(config, quiet())
    unnamed = dataclasses.replace(config, name=None)
    names = []
    for _ in range(2):
        run = RunDirectory.create(unnamed, resolve_model(config.model), {})
        names.append(run.path.name)
        with pytest.raises(UserError, match="in use by another process"):
            RunDirectory.open(run.path)
        run.close()
    assert names == ["config", "config-2"]
    stranger = path.parent / "mine"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("important")
    careless = dataclasses.replace(config, name="mine", overwrite=True)
    with pytest.raises(UserError, match="holds no run"):
        RunDirectory.create(careless, resolve_model(config.model), {})
    assert (stranger / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "no-such"}, "neither a preset"),
        ({"batch": 4096}, "one batch takes 4096"),
    ],
)
def test_bad_input_leaves_nothing_behind(config, changes, message):
    with pytest.raises(UserError, match=message):
        job.train(dataclasses.replace(config, **changes), quiet())
    assert not os.path.exists(config.runs)


def trainer_for(config):
    model = resolve_model(config.model)
    data = read_data(config, model)
    run = RunDirectory.create(config, model, data.corpus.summary())
    trainer = Trainer(run, config, model, data, quiet(), Stopwatch())
    trainer.start(resume=False)
    trainer.compile()
    return trainer


def close(trainer):
    trainer.close()
    trainer.run.close()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_stops_between_steps(config, signum, monkeypatch):
    trainer = trainer_for(config)
    record = trainer.metrics.write

    def write(kind, step, **values):
        record(kind, step, **values)
        if step == 2:
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(trainer.metrics, "write", write)
    with pytest.raises(Interrupted, match=r"saved at step 3; continue with `k3jax resume") as end:
        trainer.fit()
    assert end.value.exit_code == 128 + signum
    close(trainer)
    assert stored_steps(trainer.run.checkpoints) == [2, 3]
    assert [step for step, *_ in losses(trainer.run.path)] == [1, 2, 3]


def test_overwrite_deletes_runs_only(config, tmp_path):
    runs = Path(config.runs)
    (runs / "run").mkdir(parents=True)
    (runs / "run" / "config.json").write_text(Path(config.model).read_text())  # a checkpoint
    (runs / "run" / "model.safetensors").write_text("weights")
    with pytest.raises(UserError, match="holds no run"):
        job.train(dataclasses.replace(config, overwrite=True), quiet())
    assert (runs / "run" / "model.safetensors").exists()
    (runs / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        job.train(dataclasses.replace(config, overwrite=True, name="file"), quiet())


def test_a_run_with_damaged_checkpoints_only_is_left_as_it_is(finished, tmp_path):
    _, path, _ = finished
    run = tmp_path / "run"
    shutil.copytree(path, run)
    for step in stored_steps(run / "checkpoints"):
        (run / "checkpoints" / str(step) / "digests.json").write_text("[]")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"no checkpoint .* can be used") as error:
        job.resume(str(run), lambda old: dataclasses.replace(old, steps=7), quiet())
    assert "digests.json is not readable" in str(error.value)
    assert stored_steps(run / "checkpoints") == stored_steps(path / "checkpoints")
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("text", ["3", '{"train": null}', '{"train": {}, "model": {}}', "{"])
def test_a_config_that_is_not_of_a_run_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        job.resume(str(tmp_path), keep, quiet())


def test_lines_of_the_metrics_that_are_no_records_are_kept_apart(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "train", "step": step}) for step in (1, 2, 3)]
    file.write_bytes("\n".join([lines[0], "123", lines[1], lines[2]]).encode() + b"\n\xff")
    told = []
    cut_metrics(file, 2, told.append)
    assert [record["step"] for record in read_metrics(file)] == [1, 2]
    assert "lines [2, 5] are no records" in told[0]
    assert b"123" in (tmp_path / "metrics.damaged.jsonl").read_bytes()


@pytest.mark.slow
def test_profile_records_steps_and_what_is_due_follows(config):
    run = job.train(dataclasses.replace(config, profile=2), quiet())
    table = json.loads((run.profile / "scopes.json").read_text())
    assert table["step_seconds"] > 0
    assert {"vision_tower", "head"} <= {row["scope"].split("/")[0] for row in table["scopes"]}
    records = read_metrics(run.metrics_file)
    assert [r["step"] for r in records if r["kind"] == "evaluation"] == [4]  # due at 3
    assert stored_steps(run.checkpoints) == [2, 4, 6]
    seconds = [r["step_seconds"] for r in records if r["kind"] == "train"]
    assert len(seconds) == 6 and min(seconds) > 0 and max(seconds) < 600


def test_divergence_stops_with_a_diagnosis(config):
    trainer = trainer_for(config)
    name = next(n for n in trainer.parts.param_names if n.endswith("q_proj"))
    trainer.advance()
    trainer.state.params[name] = trainer.state.params[name].at[0].set(jnp.nan)
    with pytest.raises(Diverged, match=r"stopped at step 4: 3 steps in a row.*last good.*step 1"):
        trainer.fit()
    close(trainer)
    records = [r for r in read_metrics(trainer.run.metrics_file) if r["kind"] == "train"]
    assert [(r["step"], r["skipped"], r["loss"] is None) for r in records[1:]] == [
        (2, 1, True),
        (3, 2, True),
        (4, 3, True),
    ]


def test_metrics_after_a_torn_line_are_read_up_to_it(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write("train", 1, loss=float("nan"))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"kind": "train", "step": 1, "loss": None}]
