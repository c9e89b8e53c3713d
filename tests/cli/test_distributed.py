"""`k3jax train --distributed`: two processes of four devices, killed, continued, refused."""

import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from k3jax.checkpoint.run import DIGESTS, find_damage, stored_steps
from k3jax.train.metrics import read_metrics
from tests.train.conftest import micro_config, micro_model

pytestmark = pytest.mark.slow

PATIENCE = 300  # seconds until processes must have got where they are waited for
HEARTBEAT = 5
BOUND = HEARTBEAT + 10


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Folder of compiled programs for all tests here."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def folder(tmp_path):
    return prepare(tmp_path)


def prepare(tmp_path):
    """A text, and a model of one dense layer: starting is nearly all of the work."""
    config = micro_config(tmp_path)
    model = dataclasses.replace(
        micro_model(),
        vision=None,
        num_layers=1,
        kda_layers=(),
        full_attention_layers=(1,),
        attention_residual_block=None,
        moe=None,
    )
    Path(config.model).write_text(json.dumps(model.to_hf()))
    return tmp_path


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


class Job:
    """The processes of one start; what still runs at the end is killed."""

    def __init__(self, folder, arguments, *, compiled, processes=2, devices=4, each=()):
        environment = dict(os.environ, JAX_PLATFORMS="cpu", COLUMNS="200")
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        environment["JAX_COMPILATION_CACHE_DIR"] = str(compiled)
        port = free_port()
        self.processes, self.files = [], []
        for rank in range(processes):
            place = []
            if processes > 1:
                place = [
                    "--distributed", "--cluster.coordinator", f"localhost:{port}",
                    "--cluster.num-processes", processes, "--cluster.process-id", rank,
                    "--cluster.heartbeat-seconds", HEARTBEAT, "--cluster.start-seconds", 90,
                ]  # fmt: skip
            own = each[rank] if each else []
            command = [sys.executable, "-m", "k3jax.cli.main", *arguments, *place, *own]
            file = (folder / f"output-{port}-{rank}").open("w+")
            self.files.append(file)
            self.processes.append(
                subprocess.Popen(
                    list(map(str, command)), cwd=folder, env=environment, stdout=file, stderr=file
                )
            )

    def wait(self, seconds=PATIENCE):
        """(exit statuses, outputs)."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        return [process.returncode for process in self.processes], self.outputs()

    def outputs(self):
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read())
        return texts

    def worker(self, rank):
        """Process id of the worker of a parent."""
        pid = self.processes[rank].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def wait_until(self, condition, what):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if any(process.poll() is not None for process in self.processes):
                pytest.fail("ended early:\n" + "\n".join(self.outputs()))
            assert time.monotonic() < deadline, f"no {what} after {PATIENCE} s"
            time.sleep(0.02)

    def wait_for_text(self, text):
        self.wait_until(lambda: text in self.outputs()[0], text)

    def wait_for_step(self, run, step):
        self.wait_until(lambda: max(curve(run), default=0) >= step, f"step {step}")

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for file in self.files:
            file.close()


@pytest.fixture
def start(folder, compiled):
    jobs = []

    def begin(*arguments, **options):
        jobs.append(Job(folder, arguments, compiled=compiled, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


def options(steps, **changes):
    chosen = {
        "--data.path": "text", "--batch": 8, "--length": 16, "--steps": steps,
        "--checkpoint.every": 3, "--evaluation.every": 0, "--evaluation.final-num-bytes": 48,
        "--evaluation.sample-bytes": 0, "--mesh.fsdp": 8, "--checks.replicas-every": 2,
        "--checks.hosts-every": 2,
    } | changes  # fmt: skip
    return ["train", "config.json", *(word for item in chosen.items() for word in item)]


def curve(run):
    records = read_metrics(run / "metrics.jsonl")
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"}


def test_two_processes_of_four_devices_equal_one_of_eight(start, folder):
    one = start(*options(4), "--name", "one", processes=1, devices=8)
    assert one.wait()[0] == [0], one.outputs()
    two = start(*options(4), "--name", "two")
    assert two.wait()[0] == [0, 0], "\n".join(two.outputs())
    expected, found = curve(folder / "runs/one"), curve(folder / "runs/two")
    assert list(expected) == list(found) == [1, 2, 3, 4]
    for step in expected:
        np.testing.assert_allclose(found[step], expected[step], rtol=1e-6)
    records = read_metrics(folder / "runs/two/metrics.jsonl")
    finals = [r["held_out_bits_per_byte"] for r in records if r["kind"] == "final"]
    assert len(finals) == 1  # one writer
    hosts = [r for r in records if r["kind"] == "hosts"]
    assert [len(r["step_seconds"]) for r in hosts] == [2, 2]
    assert (folder / "runs/two/report.html").exists()
    described = json.loads((folder / "runs/two/config.json").read_text())
    assert described["environment"]["devices"]["processes"] == 2
    assert described["environment"]["mesh"]["fsdp"] == 8
    assert "run directory" not in two.outputs()[1]  # the lead speaks for all

    # The same run goes on in one process, on another mesh.
    more = start(
        "resume", "runs/two", "--steps", 6, "--mesh.fsdp", 2, "--mesh.data", 2,
        processes=1, devices=4,
    )  # fmt: skip
    assert more.wait()[0] == [0], more.outputs()
    assert list(curve(folder / "runs/two")) == [1, 2, 3, 4, 5, 6]
    (resumed,) = json.loads((folder / "runs/two/config.json").read_text())["resumed"]
    assert resumed["changed"]["mesh.fsdp"] == [8, 2]
    assert resumed["changed"]["devices.processes"] == [2, 1]


def test_a_signal_to_one_process_stops_all_after_the_same_step(start, folder):
    job = start(*options(100_000), "--name", "run")
    job.wait_for_step(folder / "runs/run", 2)
    job.processes[1].send_signal(signal.SIGTERM)
    statuses, outputs = job.wait()
    assert statuses == [143, 143], "\n".join(outputs)
    assert "SIGTERM: saved at step" in outputs[0] and "--distributed" in outputs[0]
    saved = stored_steps(folder / "runs/run/checkpoints")[-1]
    assert saved == max(curve(folder / "runs/run"))
    assert find_damage(folder / "runs/run/checkpoints" / str(saved)) is None


def test_processes_that_differ_are_refused_before_the_first_step(start, folder):
    job = start(*options(4), "--name", "run", each=[[], ["--optimizer.peak-lr", "0.5"]])
    statuses, outputs = job.wait()
    assert statuses == [2, 2], "\n".join(outputs)
    for text in outputs:
        assert "train.optimizer.peak_lr is 0.5 in process 1, 0.003 in process 0" in text
    assert not (folder / "runs").exists()
    job = start(*options(4), "--name", "run", each=[[], ["--data.path", "missing"]])
    statuses, outputs = job.wait()
    assert statuses == [2, 2], "\n".join(outputs)
    assert all("process 1: " in text and "does not exist" in text for text in outputs)


def test_a_coordinator_that_does_not_answer_has_a_status_of_its_own(start, folder):
    place = [
        "--distributed", "--cluster.coordinator", f"localhost:{free_port()}",
        "--cluster.num-processes", 2, "--cluster.process-id", 1, "--cluster.start-seconds", 1,
    ]  # fmt: skip
    statuses, (text,) = start(*options(4), *place, processes=1).wait()
    assert statuses == [6] and "(process 0) did not answer within 1 s" in text, text


@pytest.fixture(scope="module")
def whole_curve(tmp_path_factory, compiled):
    """Curve of the run that nothing disturbed, longer than those that are killed."""
    folder = prepare(tmp_path_factory.mktemp("whole"))
    arguments = options(100_000, **{"--checkpoint.every": 100, "--checks.hosts-every": 0})
    job = Job(folder, [*arguments, "--name", "run"], compiled=compiled)
    try:
        job.wait_for_step(folder / "runs/run", 60)
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.wait()[0] == [143, 143], job.outputs()
    finally:
        job.end()
    return curve(folder / "runs/run")


# 20 kills. A job must be started again after each, which is nearly all of the time.
@pytest.mark.parametrize("seed", range(4))
def test_runs_killed_at_random_moments_stop_in_time_and_continue_identically(
    start, folder, whole_curve, seed
):
    kills, chance = 5, random.Random(seed)
    run = folder / "runs/run"
    job = start(*options(100_000, **{"--checks.hosts-every": 5}), "--name", "run")
    step, seconds = 0, []
    for _ in range(kills):
        if chance.random() < 0.4:  # anywhere from reading the text to compiling and first steps
            job.wait_for_text("corpus:")
            time.sleep(chance.random() * 5)
        else:
            step += chance.randrange(1, 5)
            job.wait_for_step(run, step)
            time.sleep(chance.random() * 0.2)
        rank, kill_parent = chance.randrange(2), chance.random() < 0.2
        victim = job.processes[rank].pid if kill_parent else job.worker(rank)
        os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        job.processes[1 - rank].wait(timeout=60)
        seconds.append(time.monotonic() - begin)
        assert seconds[-1] < BOUND
        statuses, outputs = job.wait(10)
        assert statuses == [-9 if kill_parent and rank == r else 5 for r in range(2)], outputs
        other = outputs[1 - rank]
        assert f"process {rank} " in other and "k3jax resume" in other, other
        assert kill_parent or (f"process {rank} on" in outputs[rank] and "SIGKILL" in outputs[rank])
        committed = [s for s in stored_steps(run / "checkpoints")
                     if (run / "checkpoints" / str(s) / DIGESTS).exists()]  # fmt: skip
        for saved in committed:
            assert find_damage(run / "checkpoints" / str(saved)) is None
        step = max(step, max(curve(run), default=0))
        job = start("resume", "runs/run")
    last = step + 2
    job.wait_for_step(run, last)
    job.processes[0].send_signal(signal.SIGTERM)
    assert job.wait()[0] == [143, 143], job.outputs()
    print(f"seconds to stop: {', '.join(f'{s:.1f}' for s in seconds)}; bound {BOUND}")

    found = curve(run)
    steps = [r["step"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1)) and last <= len(steps) <= max(whole_curve)
    for number in steps:
        assert found[number] == whole_curve[number], f"step {number}"


def test_a_host_that_falls_silent_stops_the_others_in_time(start, folder):
    run = folder / "runs/run"
    job = start(*options(100_000), "--name", "run")
    job.wait_for_step(run, 1)
    frozen = [job.processes[1].pid, job.worker(1)]
    for pid in frozen:  # its connections stay open, as those of a host without power do
        os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        assert job.processes[0].wait(timeout=60) == 5
        assert time.monotonic() - begin < BOUND
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGKILL)
    text = job.outputs()[0]
    assert f"process 1 on 127.0.0.1 died: its host was silent for {HEARTBEAT} s" in text, text
