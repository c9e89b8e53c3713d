"""The parent of a worker of a distributed run: says which process died, and how to go on.

When a process dies, jax ends the others inside C++, where no handler runs. So the command starts
the worker as a child and outlives it. Parents watch over each other (`k3jax.train.watch`), and
leave notices of how their workers died in the run directory, `processes/<number>.json`.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from k3jax.train.watch import Watch

WORKER = "K3JAX_WORKER"  # names the worker's report file, in the worker's environment
PROCESSES = "processes"  # folder of a run directory
DIED = 5  # exit status: this or another process of the run died
PATIENCE_SECONDS = 3  # how long a worker may take to end by itself when another has died
TICK_SECONDS = 0.2  # how often a parent looks after its worker and the others
NOTICE_SECONDS = 3  # how long to wait for the notice of the process that died first
MISSED = 6  # exit status: processes did not come to where all meet, in time
# Ends that a worker chose itself, in step with the others: done, refused, diverged, no room for a
# checkpoint, others missing, copies that differ, stopped by a signal.
CHOSEN = (0, 2, 3, 4, MISSED, 7, 128 + signal.SIGINT, 128 + signal.SIGTERM)
_TAIL_BYTES = 1 << 16
# How jax and gloo speak of a peer that is gone.
_PEER_GONE = re.compile(
    r"coordination service|CoordinationService|distributed service|[Gg]loo|heartbeat|"
    r"Connection (closed|reset) by peer|leader might be|unhealthy|peer process",
)
_LEADER_GONE = "Failed to send RPC to coordination service"
# "... tasks are unhealthy (stopped sending heartbeats):" and their numbers below, or "/task:3".
_TASKS = re.compile(r"stopped sending heartbeats\):\s*((?:[\w/:]*\d+\s+)+)|/task:(\d+)")


class Report:
    """What a worker lets its parent know; does nothing in a process without one."""

    def __init__(self):
        self._path = os.environ.get(WORKER)
        self._values: dict = {}

    def update(self, **values) -> None:
        """Add or replace values: "run", "step", and what `Watch.tick` needs."""
        if self._path is None:
            return
        self._values |= values
        _write(Path(self._path), self._values)


def _write(path: Path, values: dict) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(values))
    os.replace(temporary, path)


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def is_worker() -> bool:
    """Whether a parent watches over this process."""
    return WORKER in os.environ


def report_alone() -> None:
    """Tell the parent that this worker refused to go on while the others did not."""
    if is_worker():
        path = Path(os.environ[WORKER])
        _write(path, _read(path) | {"alone": True})


def follow_parent() -> None:
    """End this process when its parent does (Linux; elsewhere the others' heartbeat ends it)."""
    with contextlib.suppress(Exception):
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def clear_notices(run: Path) -> None:
    """Forget how the workers of an earlier start ended, before this one has begun."""
    folder = run / PROCESSES
    for path in folder.glob("*.json"):
        path.unlink(missing_ok=True)
    folder.mkdir(exist_ok=True)


def supervise(arguments: Sequence[str]) -> int:
    """Run `k3jax ARGUMENTS` as a worker and see it through.

    Returns:
        The worker's status where it chose its end; `DIED` when it, or the process that ended it,
        died.
    """
    with tempfile.TemporaryDirectory(prefix="k3jax-") as folder:
        return _Parent(arguments, Path(folder) / "report.json").run()


def tasks_named(text: str) -> set[int]:
    """Numbers of the processes that jax's coordination service calls dead."""
    found = set()
    for listed, single in _TASKS.findall(text):
        found |= {int(re.search(r"\d+$", word).group()) for word in listed.split()}
        found |= {int(single)} if single else set()
    # The service itself lives in process 0.
    return found | ({0} if not found and _LEADER_GONE in text else set())


def _told(number: int, notice: dict) -> str:
    step = notice.get("step")
    after = "" if step is None else f" after step {step}"
    return f"process {number} on {notice.get('host')} died: {notice.get('how')}{after}"


class _Parent:
    def __init__(self, arguments: Sequence[str], report: Path):
        self._report, self._tail, self._watch = report, b"", Watch()
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "k3jax.cli.main", *arguments],
            env=os.environ | {WORKER: str(report)} | self._watch.environment(),
            stderr=subprocess.PIPE,
            # Signals of the terminal come through this process alone, once.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._pass_on_errors, daemon=True)

    def run(self) -> int:
        self._reader.start()
        forward = lambda signum, _frame: self._worker.send_signal(signum)  # noqa: E731
        old = {s: signal.signal(s, forward) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            killed = self._wait()
        finally:
            for signum, handler in old.items():
                signal.signal(signum, handler)
            if self._worker.poll() is None:
                self._worker.kill()
        self._reader.join(timeout=2)
        if not self._reader.is_alive():
            self._worker.stderr.close()
        code, notice = self._verdict(killed)
        self._watch.leave(_read(self._report).get("process", 0), notice)
        return code

    def _pass_on_errors(self) -> None:
        for line in self._worker.stderr:
            self._tail = (self._tail + line)[-_TAIL_BYTES:]
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    def _wait(self) -> bool:
        """Until the worker ends; whether it had to be killed because a peer is dead."""
        known_since = None
        while True:
            try:
                self._worker.wait(timeout=TICK_SECONDS)
                return False
            except subprocess.TimeoutExpired:
                pass
            if not self._notices(_read(self._report)):
                continue
            known_since = known_since or time.monotonic()
            if time.monotonic() - known_since > PATIENCE_SECONDS:
                self._worker.kill()
                self._worker.wait()
                return True

    def _notices(self, report: dict) -> dict[int, dict]:
        """How other processes died by themselves, by number."""
        found = dict(self._watch.tick(report))
        if "run" in report:
            folder = Path(report["run"]) / PROCESSES
            found |= {int(p.stem): _read(p) for p in folder.glob("*.json") if p.stem.isdigit()}
        found.pop(report.get("process"), None)
        return {number: notice for number, notice in found.items() if notice}

    def _verdict(self, killed: bool) -> tuple[int, dict | None]:
        """Exit status, and how the worker died if it did so by itself."""
        status = self._worker.returncode
        code = status if status >= 0 else 128 - status
        report = _read(self._report)
        # Who gave up waiting for a process that is dead was not refused.
        if code in CHOSEN and not killed and not (code == MISSED and self._notices(report)):
            # The others would miss it.
            if code == 4:
                return code, self._leave_notice(report, "could not write a checkpoint")
            if report.get("alone"):
                return code, self._leave_notice(report, f"gave up alone, exit status {code}")
            return code, None
        number = report.get("process", "unknown")
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        # A peer's death shows as an abort, or as an exception about connections.
        tail, notice = self._tail.decode(errors="replace"), None
        consequence = killed or (
            status in (-signal.SIGABRT, 1, 128 + signal.SIGABRT, MISSED)
            and (_PEER_GONE.search(tail) or self._notices(report))
        )
        if consequence:
            lines = [self._who_died(report, number, how)]
        else:
            notice = self._leave_notice(report, how)
            lines = [f"process {number} on {socket.gethostname()} died: {how}"]
        lines += self._how_to_go_on(report)
        print("\n".join(["", *(f"k3jax: {line}" for line in lines)]), file=sys.stderr, flush=True)
        return DIED, notice

    def _leave_notice(self, report: dict, how: str) -> dict:
        notice = {"how": how, "host": socket.gethostname(), "step": report.get("step", 0)}
        if "run" in report and "process" in report:
            with contextlib.suppress(OSError):
                _write(Path(report["run"]) / PROCESSES / f"{report['process']}.json", notice)
        return notice

    def _who_died(self, report: dict, number, how: str) -> str:
        deadline = time.monotonic() + NOTICE_SECONDS
        while not (notices := self._notices(report)) and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)
        if notices:
            dead = "; ".join(_told(other, notice) for other, notice in sorted(notices.items()))
            return f"{dead}; this is process {number}, which ended with it ({how})"
        tail = self._tail.decode(errors="replace")
        named = sorted(tasks_named(tail) - {number})
        who = f"process {', '.join(map(str, named))}" if named else "another process"
        return (
            f"{who} died or lost its connection (its host left no notice); this is process "
            f"{number}, which ended with it ({how})"
        )

    def _how_to_go_on(self, report: dict) -> list[str]:
        if "run" not in report:
            return ["the run had not begun; start it again"]
        run = Path(report["run"])
        saved = [
            int(p.parent.name)
            for p in (run / "checkpoints").glob("*/digests.json")
            if p.parent.name.isdigit()
        ]
        newest = f"the newest checkpoint is of step {max(saved)}" if saved else "no checkpoint yet"
        return [
            f"last step: {report.get('step', 0)}; {newest}",
            f"continue in all processes with: k3jax resume {run} --distributed",
        ]
