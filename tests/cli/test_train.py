"""`k3jax train` and `k3jax resume` as processes: killed, stopped, continued, refused."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from k3jax.train.metrics import read_metrics
from tests.train.conftest import micro_config

PATIENCE = 240  # seconds until a process must have got where it is waited for


@pytest.fixture
def command(tmp_path):
    """Starts a command line in `tmp_path`; what still runs at the end is killed."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", COLUMNS="200")
    environment["XLA_FLAGS"] = ""  # one device, as a user has
    environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "compiled")
    processes = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "k3jax.cli.main", *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def options(tmp_path, steps):
    """Arguments of `k3jax train` for the smallest model."""
    config = micro_config(tmp_path)
    return [
        config.model, "--data.path", config.data.path, "--steps", steps, "--batch", 4, "--length",
        32, "--checkpoint.every", 10, "--evaluation.every", 25, "--evaluation.num-bytes", 64,
    ]  # fmt: skip


def curve(run):
    records = read_metrics(run / "metrics.jsonl")
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"}


def wait_for_step(process, run, step):
    """Until the run has recorded a step."""
    deadline = time.monotonic() + PATIENCE
    while max(curve(run), default=0) < step:
        if process.poll() is not None:
            pytest.fail(f"ended early with {process.returncode}: {process.communicate()[0]}")
        assert time.monotonic() < deadline, f"no step {step} after {PATIENCE} s"
        time.sleep(0.02)


def stop(process):
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 143, output
    return output


def killed_runs_continue_exactly(command, tmp_path, kills, seed):
    """A run killed at random steps and resumed, against one that was left alone."""
    arguments = options(tmp_path, steps=100_000)
    last = 20 * (kills + 1)
    whole = command("train", *arguments, "--name", "whole")
    wait_for_step(whole, tmp_path / "runs/whole", last)
    assert "SIGTERM: saved at step" in stop(whole)

    chance = random.Random(seed)
    run = tmp_path / "runs/broken"
    process = command("train", *arguments, "--name", "broken")
    for kill in range(kills):
        wait_for_step(process, run, 20 * kill + chance.randrange(1, 20))
        time.sleep(chance.random() * 0.02)
        process.kill()
        process.wait()
        process = command("resume", "runs/broken")
    wait_for_step(process, run, last)
    stop(process)

    expected, found = curve(tmp_path / "runs/whole"), curve(run)
    common = min(max(expected), max(found))
    assert common >= last
    steps = [r["step"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    for step in range(1, common + 1):
        assert found[step] == expected[step], f"step {step}"
    described = json.loads((run / "config.json").read_text())
    assert len(described["resumed"]) == kills


@pytest.mark.slow
def test_run_killed_at_a_random_step_resumes_with_the_identical_curve(command, tmp_path):
    killed_runs_continue_exactly(command, tmp_path, kills=1, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_run_killed_many_times_resumes_with_the_identical_curve(command, tmp_path, seed):
    killed_runs_continue_exactly(command, tmp_path, kills=6, seed=seed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--data.path", "missing"], "does not exist; --data.path takes a folder"),
        (["train", "--data.path", "empty"], "/empty: no non-empty UTF-8 file in it"),
        (["train", "tinny"], "neither a preset (tiny, small) nor an existing config.json"),
        (["resume", "runs/none"], "is not a run directory"),
        (["generate", "empty", "--prompt", "x"], "empty"),
    ],
)
def test_user_errors_are_one_line_and_leave_nothing(
    tmp_path, monkeypatch, capsys, arguments, message
):
    from k3jax.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
