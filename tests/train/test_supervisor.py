"""What parents say when workers die; the workers here are a few lines of Python."""

import json
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from k3jax.train import supervisor
from k3jax.train.processes import _verdict
from k3jax.train.stopping import ReplicasDiffer
from k3jax.train.supervisor import DIED, MISSED, PROCESSES, clear_notices, supervise, tasks_named

PREFACE = """
import json, os, signal, sys, time
def report(**values):
    open(os.environ["K3JAX_WORKER"], "w").write(json.dumps(values))
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    (tmp_path / "checkpoints" / "20" / "digests.json").write_text("{}")
    clear_notices(tmp_path)
    return tmp_path


@pytest.fixture
def end_as(monkeypatch, capfd, run):
    """Runs a program as the worker of process `number`: (status, what the parent printed)."""
    popen = subprocess.Popen

    def end(number, program):
        start = (
            f"report(process={number}, processes=2, run={str(run)!r}, step=23, "
            "heartbeat_seconds=1)\n"
        )
        text = PREFACE + start + textwrap.dedent(program)

        def worker(_, **options):
            return popen([sys.executable, "-S", "-c", text], **options)

        monkeypatch.setattr(supervisor.subprocess, "Popen", worker)
        status = supervise(["train"])
        return status, capfd.readouterr().err

    return end


@pytest.mark.parametrize("status", [0, 2, 3, 4, 6, 7, 143])
def test_ends_that_a_worker_chose_are_passed_on(end_as, status):
    assert end_as(0, f"sys.exit({status})") == (status, "")


def test_a_killed_worker_is_named_with_the_way_to_go_on(end_as, run):
    status, text = end_as(1, "os.kill(os.getpid(), signal.SIGKILL)")
    assert status == DIED
    assert "process 1 on" in text and "died: SIGKILL" in text
    assert "last step: 23; the newest checkpoint is of step 20" in text
    assert f"k3jax resume {run} --distributed" in text
    notice = json.loads((run / PROCESSES / "1.json").read_text())
    assert (notice["how"], notice["step"]) == ("SIGKILL", 23)
    clear_notices(run)
    assert not list((run / PROCESSES).iterdir())


ABORT = """
print("{}", file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGABRT)
"""


def test_a_worker_that_ended_with_a_peer_names_the_peer(end_as, run):
    (run / PROCESSES / "1.json").write_text('{"how": "SIGKILL", "host": "b", "step": 22}')
    status, text = end_as(0, ABORT.format("error from the coordination service"))
    assert status == DIED
    assert "process 1 on b died: SIGKILL after step 22; this is process 0" in text
    assert not (run / PROCESSES / "0.json").exists()  # it did not die by itself


def test_a_peer_whose_host_is_gone_is_named_by_what_jax_says(end_as, monkeypatch):
    monkeypatch.setattr(supervisor, "NOTICE_SECONDS", 0.1)
    words = "coordination service: tasks are unhealthy (stopped sending heartbeats):\\n1\\nThe"
    status, text = end_as(0, ABORT.format(words))
    assert status == DIED
    assert "process 1 died or lost its connection (its host left no notice)" in text


def test_a_worker_that_hangs_on_a_dead_peer_is_ended(end_as, run, monkeypatch):
    monkeypatch.setattr(supervisor, "PATIENCE_SECONDS", 0)
    (run / PROCESSES / "1.json").write_text('{"how": "SIGKILL", "host": "b", "step": 22}')
    status, text = end_as(0, "time.sleep(60)")
    assert status == DIED and "process 1 on b died" in text


def test_a_crash_of_its_own_is_not_blamed_on_others(end_as):
    status, text = end_as(0, "raise RuntimeError('no luck')")
    assert status == DIED
    assert "no luck" in text and "process 0 on" in text and "died: exit status 1" in text


def test_a_refusal_of_one_process_alone_is_told_to_the_others(end_as, run):
    assert end_as(1, "sys.exit(2)") == (2, "")
    assert not (run / PROCESSES / "1.json").exists()
    program = """
        from k3jax.train.supervisor import report_alone
        report_alone()
        sys.exit(2)
    """
    assert end_as(1, program) == (2, "")
    assert json.loads((run / PROCESSES / "1.json").read_text())["how"] == (
        "gave up alone, exit status 2"
    )


def test_who_gave_up_waiting_for_a_dead_process_was_not_refused(end_as, run):
    (run / PROCESSES / "1.json").write_text('{"how": "SIGKILL", "host": "b", "step": 22}')
    status, text = end_as(0, f"sys.exit({MISSED})")
    assert status == DIED and "process 1 on b died: SIGKILL" in text


def test_signals_reach_the_worker(end_as):
    program = """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        print("ready", file=sys.stderr, flush=True)
        time.sleep(60)
    """
    timer = threading.Timer(1.5, signal.raise_signal, [signal.SIGTERM])
    timer.start()
    assert end_as(0, program)[0] == 143
    timer.join()


def test_tasks_that_jax_calls_dead():
    several = "unhealthy (stopped sending heartbeats):\n3\n/job:jax_worker/replica:0/task:12\nThe x"
    assert tasks_named(several) == {3, 12}
    assert tasks_named("Gloo: step 7 of 9") == set()
    lost = "UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was"
    assert tasks_named(lost) == {0}


def test_what_differs_is_named_once_with_its_processes():
    same = [None, {}]
    assert _verdict([same, same]) is None
    differs = [None, {"train.batch": [8, 16], "environment.packages.jax": ["1", "2"]}]
    text = _verdict([same, differs, differs])
    assert "train.batch is 16 in processes 1, 2, 8 in process 0" in text
    assert 'environment.packages.jax is "2" in processes 1, 2' in text
    assert _verdict([same, ["no text", {}]]) == "process 1: no text"
    assert _verdict([["no text", {}], ["no text", {}]]) == "no text"


def test_arrays_that_differ_stop_a_run_by_name():
    error = ReplicasDiffer(20, {"params.language.head": ["d3 of process 1"]})
    assert error.exit_code not in (0, 2, 3, 4, 5)
    assert "after step 20" in str(error) and "params.language.head on d3 of process 1" in str(error)
