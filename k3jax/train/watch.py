"""How the parents of a distributed run watch over each other.

Beats come from the parents, not from the workers: a worker that compiles keeps every core busy, and
where its share of them is small, the beats of jax, sent by a thread of the worker twice per
timeout, wait behind its own compilation for seconds. Parents sleep nearly always, in a scheduling
group of their own, and are run at once.

All connect to the parent of process 0, which passes on what it learns. A line is one message: a
beat, an end that was chosen, or the notice of a process that died.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import time

WATCH = "K3JAX_WATCH"  # "PORT SECRET" of the parent, in the worker's environment
# Seconds between beats, and the most that one tick counts: time in which this process did not run
# itself is not held against the others. Both as parts of the heartbeat, and at most one second.
BEAT, LONGEST_TICK = 0.1, 0.2
_CONNECT_SECONDS = 2
_FAREWELL_SECONDS = 1
_ALIVE, _END = b".", b"end"


def own_address(host: str) -> list | None:
    """Where the parent of this worker listens: [host, port, secret]; None without a parent."""
    if WATCH not in os.environ:
        return None
    port, secret = os.environ[WATCH].split()
    return [host, int(port), secret]


class _Link:
    """A connection that never blocks, read line by line."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._connection, self._rest = connection, b""
        self.host = connection.getpeername()[0].removeprefix("::ffff:")
        self.silent_seconds, self.closed = 0.0, False

    def lines(self) -> list[bytes]:
        """Complete lines that have arrived."""
        try:
            while data := self._connection.recv(1 << 16):
                self._rest += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *whole, self._rest = self._rest.split(b"\n")
        return whole

    def send(self, line: bytes) -> None:
        # Whoever cannot be reached is found by its silence.
        with contextlib.suppress(OSError):
            self._connection.sendall(line + b"\n")

    def close(self, deadline: float = 0.0) -> None:
        """Close; until the deadline let the other side close first, so that it has read all."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                self._connection.settimeout(left)
                if not self._connection.recv(1 << 16):
                    break
        self._connection.close()


class Watch:
    """One parent's view of the others; driven by `tick`, without a thread."""

    def __init__(self):
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=dual, backlog=4096
        )
        self._listener.setblocking(False)
        self._secret = secrets.token_hex(8)
        self._links: dict[int, _Link] = {}  # by number of the process
        self._callers: list[_Link] = []  # have not said who they are
        self._met: set[int] = set()
        self._dead: dict[int, dict] = {}
        self._last_tick = time.monotonic()
        self._last_beat = 0.0
        self._waited_seconds = 0.0  # for those that have not connected
        self._complete = False

    def environment(self) -> dict[str, str]:
        """For the worker, which tells the others where this parent listens."""
        return {WATCH: f"{self._listener.getsockname()[1]} {self._secret}"}

    def tick(self, report: dict) -> dict[int, dict]:
        """Hear the others and be heard; several times per second.

        Args:
            report: of the worker: "process", "processes", "heartbeat_seconds" and "watch", the
                address of the parent of process 0.

        Returns:
            Notices ("how", "host", "step") of processes that died, by number.
        """
        if report.get("watch") is None or report["processes"] < 2:
            return {}
        now, heartbeat = time.monotonic(), report["heartbeat_seconds"]
        passed = min(now - self._last_tick, LONGEST_TICK * heartbeat, 1.0)
        self._last_tick = now
        if not self._complete:
            self._waited_seconds += passed
            self._meet(report)
        for number, link in list(self._links.items()):
            link.silent_seconds += passed
            for line in link.lines():
                link.silent_seconds = 0.0
                self._heed(number, line)
            if self._links.get(number) is not link:
                continue
            if link.closed:
                self._lose(number, "its parent process was killed, or its host went down")
            elif link.silent_seconds > heartbeat:
                self._lose(number, f"its host was silent for {heartbeat} s")
        if now - self._last_beat > min(BEAT * heartbeat, 1.0):
            self._last_beat = now
            self._tell(_ALIVE)
        return self._dead

    def leave(self, number: int, notice: dict | None) -> None:
        """Say goodbye.

        Args:
            number: of this process.
            notice: how its worker died; None when it chose its end or ended with another.
        """
        self._tell(_END if notice is None else _news(number, notice))
        deadline = time.monotonic() + (_FAREWELL_SECONDS if self._links else 0)
        for link in [*self._links.values(), *self._callers]:
            link.close(deadline)
        self._links, self._callers = {}, []
        self._listener.close()

    def _meet(self, report: dict) -> None:
        lead = report["process"] == 0
        if lead:
            self._accept(report["processes"])
            self._complete = len(self._met) == report["processes"] - 1
        else:
            self._complete = self._connect(report)
        if self._complete or self._waited_seconds <= report["heartbeat_seconds"]:
            return
        self._complete = not lead  # the lead lets late ones in, but speaks of it once
        missing = sorted(set(range(1, report["processes"])) - self._met)
        who = f"of the parents of processes {missing}" if lead else "to the parent of process 0"
        self._waited_seconds = float("-inf")
        host, port, _ = report["watch"]
        print(
            f"k3jax: warning: no connection {who} ({host}:{port}) within "
            f"{report['heartbeat_seconds']} s; let the hosts reach each other on all ports. "
            "Without it a host that goes down is noticed late, by jax alone",
            file=sys.stderr,
            flush=True,
        )

    def _accept(self, processes: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._callers.append(_Link(self._listener.accept()[0]))
        for caller in list(self._callers):
            words = (caller.lines() or [b""])[0].split()
            if not words and not caller.closed:
                continue
            self._callers.remove(caller)
            known = len(words) == 2 and words[0].decode(errors="replace") == self._secret
            number = int(words[1]) if known and words[1].isdigit() else 0
            if 0 < number < processes and number not in self._met:
                self._links[number] = caller
                self._met.add(number)
            else:
                caller.close()

    def _connect(self, report: dict) -> bool:
        host, port, secret = report["watch"]
        try:
            link = _Link(socket.create_connection((host, port), timeout=_CONNECT_SECONDS))
        except OSError:
            return False
        link.send(f"{secret} {report['process']}".encode())
        self._links[0] = link
        return True

    def _heed(self, number: int, line: bytes) -> None:
        """Act on what process `number` says."""
        if line == _END:
            self._links.pop(number).close()
        elif line != _ALIVE:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                notice = json.loads(line)
                self._note(notice.pop("process"), notice)

    def _lose(self, number: int, how: str) -> None:
        self._note(number, {"how": how, "host": self._links[number].host, "step": None})

    def _note(self, number: int, notice: dict) -> None:
        if number in self._links:
            self._links.pop(number).close()
        if number not in self._dead:
            self._dead[number] = notice
            if 0 not in self._links and number != 0:  # the lead tells the others
                self._tell(_news(number, notice))

    def _tell(self, line: bytes) -> None:
        for link in self._links.values():
            link.send(line)


def _news(number: int, notice: dict) -> bytes:
    return json.dumps({"process": number, **notice}).encode()
