"""Checks of the machines under a run: copies that drifted apart, processes that are slow."""

import concurrent.futures
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.train.placement import Placement
from k3jax.train.processes import Together
from k3jax.train.stopping import ReplicasDiffer
from meshes import distributed
from meshes.replicas import device_digests, disagreements

# A process is named as slow when it needs this many times the median.
SLOW = 1.25
PROBE_DIM, PROBE_REPEATS = 512, 4


class ReplicaCheck:
    """Compares the copies that devices hold of the same array.

    Args:
        placement: of the run.
        named: name -> array of the state, for names and places (abstract is enough).
    """

    def __init__(self, placement: Placement, named: dict):
        self._mesh = placement.mesh
        self._names = tuple(named)
        if self._mesh is not None:
            self._specs = [array.sharding.spec for array in named.values()]
            self._digests = Together("digests", jax.jit(device_digests))

    def run(self, arrays: dict, step: int) -> None:
        """Compare now. All processes call this at the same step.

        Raises:
            ReplicasDiffer: names the arrays, and the devices whose copy is not that of most.
        """
        if self._mesh is None:
            return
        digests = np.asarray(self._digests([arrays[name] for name in self._names]))
        found = disagreements(digests, self._specs, self._mesh)
        if found:
            raise ReplicasDiffer(
                step,
                {
                    self._names[number]: [f"{d} of process {d.process_index}" for d in devices]
                    for number, devices in found.items()
                },
            )


class HostReport:
    """Gathers the times of all processes now and then, and names the slowest.

    In a synchronous step all processes take as long as the slowest, so beside the step each
    reports what it does alone: waiting for data, and a small product on its own devices.
    """

    def __init__(self):
        self._steps: list[float] = []
        self._data: list[float] = []

    def note_step(self, seconds: float) -> None:
        """Time of one step."""
        self._steps.append(seconds)

    def note_data(self, seconds: float) -> None:
        """Time this process waited for one batch."""
        self._data.append(seconds)

    def gather(self, step: int) -> dict | None:
        """What the processes did since the last time, in process 0; None in the others.

        Returns:
            "step_seconds", "data_seconds" and "probe_seconds" by process, and "slow": a sentence
            for each that stands out.
        """
        # A thread of its own: the mesh in force here belongs to this one.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            probe = thread.submit(_probe).result()
        own = [statistics.fmean(self._steps or [0]), statistics.fmean(self._data or [0]), probe]
        self._steps, self._data = [], []
        found = distributed.gather_to_lead(f"hosts/{step}", own)
        if found is None:
            return None
        columns = dict(zip(("step_seconds", "data_seconds", "probe_seconds"), zip(*found)))
        return {name: list(values) for name, values in columns.items()} | {
            "slow": slow_processes(columns)
        }


def slow_processes(columns: dict[str, tuple[float, ...]]) -> list[str]:
    """A sentence for each kind of time in which a process stands out."""
    words = {
        "data_seconds": "waits for its data",
        "probe_seconds": "computes a product of its own",
    }
    step = max(columns["step_seconds"])
    sentences = []
    for name, text in words.items():
        values = columns[name]
        if len(values) < 2:
            continue
        usual, slowest = statistics.median_low(values), max(values)
        # Data that comes while a step is computed costs nothing.
        counts = name != "data_seconds" or slowest > 0.02 * step
        if counts and slowest > SLOW * usual:
            sentences.append(
                f"process {values.index(slowest)} {text} {slowest:.4f} s, "
                f"{slowest / max(usual, 1e-9):.1f} times the median"
            )
    return sentences


@jax.jit
def _product(x):
    for _ in range(PROBE_REPEATS):
        x = x @ x
    return x


def _probe() -> float:
    """Seconds of a small product on the slowest device of this process."""
    slowest, zeros = 0.0, np.zeros((PROBE_DIM, PROBE_DIM), jnp.bfloat16)
    for device in jax.local_devices():
        x = jax.device_put(zeros, device)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            _product(x).block_until_ready()
            times.append(time.perf_counter() - start)
        slowest = max(slowest, min(times))
    return slowest
