"""Timing side by side in one process, and the ceilings of the machine to compare with."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def time_interleaved(
    programs: dict[str, Callable[[], object]],
    rounds: int,
    *,
    runs: dict[str, int] | None = None,
    least_seconds: float = 0.0,
) -> dict[str, float]:
    """Return the median seconds of one call of each program.

    In each round the programs take turns, so that other load on the machine meets them alike. A
    first turn of one call each compiles and is not counted.

    Args:
        programs: name -> function without arguments that returns its arrays.
        rounds: turns of each program that count.
        runs: calls within one turn, each timed by itself; 1 where not named.
        least_seconds: short programs are called several times without waiting in between until
            a turn takes about so long, and the time is divided: dispatch is then hidden as it is
            within a model. 0 times every call by itself.
    """
    seconds, calls = {name: [] for name in programs}, {}
    for number in range(rounds + 1):
        for name, program in programs.items():
            if number == 0:
                jax.block_until_ready(program())
                once = _time_calls(program, 1)
                calls[name] = max(1, min(1000, int(least_seconds / max(once, 1e-6))))
                continue
            for _ in range((runs or {}).get(name, 1)):
                seconds[name].append(_time_calls(program, calls[name]))
    return {name: statistics.median(values) for name, values in seconds.items()}


def _time_calls(program: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = program()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def matmul_rate(size: int, dtype: jnp.dtype, rounds: int = 5) -> float:
    """Return operations per second of a square matrix product: the measured ceiling."""
    matrix = jax.random.normal(jax.random.key(0), (size, size), dtype)
    program = jax.jit(lambda x: jnp.matmul(x, x)).lower(matrix).compile()
    seconds = time_interleaved({"matmul": lambda: program(matrix)}, rounds, least_seconds=0.02)
    return 2 * size**3 / seconds["matmul"]


def copy_rate(num_bytes: int, rounds: int = 5) -> float:
    """Return bytes per second, read and written together, of adding 1 to a large array."""
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    program = jax.jit(lambda x: x + 1).lower(array).compile()
    seconds = time_interleaved({"copy": lambda: program(array)}, rounds, least_seconds=0.02)
    return 2 * num_bytes / seconds["copy"]
