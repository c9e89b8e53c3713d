"""The roll call before jax starts: who is missing is named, within the time given."""

import socket
import threading
import time

import pytest

from meshes.clusters import Cluster
from meshes.distributed import DistributedError, ProcessesDiffer, call_roll


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


kinds = []  # of the errors of the latest call


def call(ranks, count, *, seconds, counts=None):
    """Each rank's error text, or None, of processes that call at the same time."""
    address, results = f"localhost:{free_port()}", {}
    kinds.clear()

    def run(place, rank):
        told = (counts or {}).get(rank, count)
        cluster = Cluster(coordinator=address, num_processes=told, process_id=rank)
        try:
            results[place] = call_roll(cluster, seconds)
        except DistributedError as error:
            results[place] = str(error)
            kinds.append(type(error))

    threads = [threading.Thread(target=run, args=item) for item in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[place] for place in range(len(ranks))]


def test_all_present_go_on():
    assert call([2, 0, 1], 3, seconds=10) == [None, None, None]


def test_missing_processes_are_named_to_all():
    begin = time.monotonic()
    for text in call([0, 2], 4, seconds=1):
        assert "2 of 4 processes did not come within 1 s: number 1, 3" in text
    assert time.monotonic() - begin < 8
    assert kinds == [DistributedError, DistributedError]


def test_processes_that_were_told_different_numbers():
    for text in call([0, 1], 2, seconds=5, counts={1: 3}):
        assert "process 1 at" in text and "was told of 3 processes, process 0 of 2" in text
    assert kinds == [ProcessesDiffer, ProcessesDiffer]  # coming again would not help


def test_two_processes_of_one_number():
    texts = call([0, 1, 1], 3, seconds=2)
    assert "two processes say that they are number 1" in texts[0]


def test_a_coordinator_that_is_not_there():
    (text,) = call([1], 2, seconds=1)
    assert "did not answer within 1 s" in text and "(process 0)" in text
    assert "Check that process 0 runs on that host" in text


def test_a_coordinator_that_says_nothing():
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        cluster = Cluster(coordinator=address, num_processes=2, process_id=1)
        begin = time.monotonic()
        with pytest.raises(DistributedError, match="took the connection of process 1 but did not"):
            call_roll(cluster, -3)  # the limit is past: only the margin is waited
        assert time.monotonic() - begin < 10


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        cluster = Cluster(coordinator=f"localhost:{port}", num_processes=2, process_id=0)
        with pytest.raises(DistributedError, match=f"cannot listen on port {port}"):
            call_roll(cluster, 1)


def test_another_program_on_the_port_is_not_taken_for_process_0():
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        cluster = Cluster(coordinator=f"localhost:{port}", num_processes=2, process_id=1)

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.makefile().readline()
                connection.sendall(b"HTTP/1.1 400 Bad \xff\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(DistributedError, match=r"another program answers at .*'HTTP/1.1 400"):
            call_roll(cluster, 5)
        thread.join()
