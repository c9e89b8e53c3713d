"""Parents that watch over each other: what is noticed, by whom, and what is not taken for death."""

import socket
import threading
import time

import pytest

from k3jax.train.watch import WATCH, Watch, own_address

HEARTBEAT = 0.5


class Parents:
    """The parents of three processes, in one thread."""

    def __init__(self, heartbeat=HEARTBEAT):
        self.watches = [Watch() for _ in range(3)]
        port, secret = self.watches[0].environment()[WATCH].split()
        common = {
            "processes": 3,
            "heartbeat_seconds": heartbeat,
            "watch": ["localhost", int(port), secret],
        }
        self.reports = [{"process": number, **common} for number in range(3)]
        self.dead = [{}, {}, {}]

    def leave(self, number, notice=None):
        thread = threading.Thread(target=self.watches[number].leave, args=(number, notice))
        thread.start()  # it waits for the others to close
        self.tick_until(lambda: not thread.is_alive(), *({0, 1, 2} - {number}))

    def tick(self, *numbers):
        for number in numbers or range(3):
            self.dead[number] = self.watches[number].tick(self.reports[number])

    def tick_until(self, condition, *numbers, seconds=10):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.dead
            self.tick(*numbers)
            time.sleep(0.02)

    def tick_for(self, seconds, *numbers):
        end = time.monotonic() + seconds
        self.tick_until(lambda: time.monotonic() > end, *numbers)


@pytest.fixture
def parents():
    parents = Parents()
    parents.tick_until(lambda: set(parents.watches[0]._links) == {1, 2})
    yield parents
    for number, watch in enumerate(parents.watches):
        for link in watch._links.values():
            link.close()
        watch._links = {}
        watch.leave(number, None)


def test_the_living_and_those_who_took_leave_are_not_missed(parents):
    parents.tick_for(1.5 * HEARTBEAT)
    assert parents.dead == [{}, {}, {}]
    parents.leave(2)
    parents.tick_for(1.5 * HEARTBEAT, 0, 1)
    assert parents.dead == [{}, {}, {}]


def test_a_death_is_told_to_all(parents):
    notice = {"how": "SIGKILL", "host": "c", "step": 7}
    parents.leave(2, notice)
    parents.tick_until(lambda: parents.dead[1], 0, 1)
    assert parents.dead[:2] == [{2: notice}, {2: notice}]


def test_a_parent_that_is_killed_is_noticed_at_once(parents):
    parents.watches[1]._links.pop(0)._connection.close()  # as the system does
    begin = time.monotonic()
    parents.tick_until(lambda: parents.dead[2], 0, 2)
    assert time.monotonic() - begin < HEARTBEAT
    assert "killed" in parents.dead[0][1]["how"] and parents.dead[2] == parents.dead[0]


@pytest.mark.parametrize("silent", [0, 2])
def test_a_host_that_is_silent_for_a_heartbeat_is_dead(parents, silent):
    begin = time.monotonic()
    parents.tick_until(lambda: parents.dead[1], *({0, 1, 2} - {silent}))
    assert HEARTBEAT - 0.2 < time.monotonic() - begin < HEARTBEAT + 1
    assert parents.dead[1][silent]["how"] == "its host was silent for 0.5 s"
    assert set(parents.dead[1]) == {silent}


def test_time_in_which_the_watcher_did_not_run_does_not_count(parents):
    time.sleep(1.5 * HEARTBEAT)  # nobody has run: the whole machine was held up
    parents.tick(0)
    assert parents.dead[0] == {}
    parents.tick_for(0.5 * HEARTBEAT)
    assert parents.dead == [{}, {}, {}]


def test_strangers_are_sent_away(parents):
    port = parents.reports[0]["watch"][1]
    late = Parents()
    late.reports[0]["processes"] = 2  # one place is left free
    own = late.reports[0]["watch"][1]
    for text in (b"GET / HTTP/1.1\n", b"wrong 1\n", b"\xff\xff 1\n"):
        with socket.create_connection(("localhost", own)) as stranger:
            stranger.sendall(text)
            stranger.settimeout(0.05)
            closed = []

            def is_sent_away(stranger=stranger, closed=closed):
                try:
                    closed.append(stranger.recv(1))
                except TimeoutError:
                    return False
                return closed == [b""]

            late.tick_until(is_sent_away, 0)
    assert late.watches[0]._links == {} and port != own
    late.tick_until(lambda: 1 in late.watches[0]._links, 0, 1)
    for number, watch in enumerate(late.watches):
        watch.leave(number, None)


def test_a_port_that_cannot_be_reached_is_said_once(capfd):
    parents = Parents()
    parents.watches[0]._listener.close()
    parents.tick_for(1.5 * HEARTBEAT, 1)
    text = capfd.readouterr().err
    assert text.count("no connection to the parent of process 0 (localhost:") == 1
    assert "let the hosts reach each other" in text and parents.dead[1] == {}
    for number, watch in enumerate(parents.watches):
        watch.leave(number, None)


def test_a_worker_without_a_parent_has_no_address(monkeypatch):
    monkeypatch.delenv(WATCH, raising=False)
    assert own_address("here") is None
    monkeypatch.setenv(WATCH, "81 abc")
    assert own_address("here") == ["here", 81, "abc"]
