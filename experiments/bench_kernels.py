"""Time every kernel on this machine's device: all implementations of a call, in one process.

    python -m experiments.bench_kernels                          # what fits this device
    python -m experiments.bench_kernels --op kda --size k3       # one op at the shapes of K3
    python -m experiments.bench_kernels --out runs/bench         # also report.html, PNG, JSON
    python -m experiments.bench_kernels --seconds 240            # begin no call after 4 minutes

Every number is a median over rounds in which the implementations take turns; each result is
compared with the definition (small shapes) or the XLA form (shapes of K3) in the same run, and the
status is 1 when one differs. `roofline` is the least time the device could need, from the call's
operations and bytes and from a matrix product and a copy measured first, over the time it took;
calls that fit in a cache, as small shapes do on a CPU, may exceed it.
On a GPU flash-linear-attention and FlashKDA run in the same process where they are installed.
On two CPU cores (small shapes) it takes some minutes, most of it compiling.
"""

import dataclasses
import functools
import json
import os
import pathlib
import time

# PyTorch's kernels, where installed, need memory beside jax's.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

from experiments import bench_report, torch_baselines
from experiments.kernel_cases import KernelCase, choose_cases
from experiments.timing import copy_rate, matmul_rate, time_interleaved
from pallas_kernels.device import current_device

# Largest relative L2 difference between two implementations, by the precision of the inputs: each
# may be off from the definition by its own bound, gradients sum more terms than values.
AGREEMENT = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Time kernels side by side and compare their results."""

    op: str | None = None
    """Only this op."""
    name: str | None = None
    """Only calls whose name contains this."""
    size: str | None = None
    """small, k3 or all; None: small on a CPU, all elsewhere."""
    rounds: int = 5
    """Turns of each implementation that count; the median is reported."""
    reference: bool = False
    """Also time the definition, which is slow on purpose."""
    seconds: float | None = None
    """Begin no further call after so many seconds; what was left out is named."""
    out: pathlib.Path | None = None
    """Folder for report.html, one picture per op and results.json."""

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1")
        if self.size not in (None, "small", "k3", "all"):
            raise ValueError(f"size={self.size!r} is unknown; use small, k3 or all")


def measure_ceilings(platform: str) -> dict[str, float]:
    """Return the device's measured operations per second by dtype, and bytes per second."""
    size, num_bytes = (1024, 2**27) if platform == "cpu" else (8192, 2**31)
    return {
        "float32": matmul_rate(size, jnp.float32),
        "bfloat16": matmul_rate(size, jnp.bfloat16),
        "bytes_per_second": copy_rate(num_bytes),
    }


def measure_case(case: KernelCase, rounds: int, ceilings: dict, reference: bool) -> dict:
    """Return times, roofline fractions and differences of one call's implementations."""
    inputs = jax.block_until_ready(jax.jit(case.make_inputs)())
    precision = precision_of(inputs)
    programs, left_out = {}, {}
    names = ("reference",) * reference + case.implementations
    for name in names:
        form = case.function(name)
        try:
            programs[name] = jax.jit(form).lower(*inputs).compile()
        except (NotImplementedError, ValueError) as reason:  # says what is not supported, and why
            left_out[name] = str(reason)
    for name, form in case.baselines.items():
        programs[name] = jax.jit(form).lower(*inputs).compile()
    yardstick = "reference" if case.size == "small" else "xla"
    expected = jax.jit(case.function(yardstick))(*inputs)
    errors = {
        name: difference_of(program(*inputs), expected)
        for name, program in programs.items()
        if name != yardstick
    }
    calls = {name: functools.partial(program, *inputs) for name, program in programs.items()}
    foreign = torch_baselines.calls_for(case, inputs)
    seconds = time_interleaved(calls, rounds, least_seconds=0.02)
    seconds |= torch_baselines.time_calls(foreign, rounds)
    least = max(case.flops / ceilings[precision], case.bytes / ceilings["bytes_per_second"])
    return {
        "op": case.op,
        "name": case.name,
        "size": case.size,
        "precision": precision,
        "yardstick": yardstick,
        "seconds": seconds,
        "roofline": {name: least / value for name, value in seconds.items()},
        "matmul_fraction": {
            name: case.flops / value / ceilings[precision] for name, value in seconds.items()
        },
        "differences": errors,
        "agree": all(error <= AGREEMENT[precision] for error in errors.values()),
        "left_out": left_out,
    }


def precision_of(inputs) -> str:
    """bfloat16 when any operand is (or is packed to fewer bits), else float32."""
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(inputs)}
    return "bfloat16" if kinds & {"bfloat16", "uint8"} else "float32"


def difference_of(actual, expected) -> float:
    """Largest relative L2 difference over the arrays of the results."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        x, y = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, y))
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)
        worst = max(worst, float(error) if np.isfinite(error) else float("inf"))
    return worst


def main(config: BenchConfig) -> None:
    """Measure, print, write; status 1 when results disagree."""
    console, device = Console(), current_device()
    size = config.size or ("small" if device.platform == "cpu" else "all")
    cases = choose_cases(op=config.op, name=config.name, size=None if size == "all" else size)
    start, results, skipped = time.perf_counter(), [], []
    console.print(f"measuring the ceilings of {device.kind} ...")
    ceilings = measure_ceilings(device.platform)
    for number, case in enumerate(cases, 1):
        if config.seconds is not None and time.perf_counter() - start > config.seconds:
            skipped = [case.title for case in cases[number - 1 :]]
            break
        console.print(f"[{number}/{len(cases)}] {case.title} ...")
        results.append(measure_case(case, config.rounds, ceilings, config.reference))
        bench_report.print_result(results[-1], console)
    outcome = {
        "device": device.kind,
        "versions": torch_baselines.describe_versions(),
        "ceilings": ceilings,
        "results": results,
        "skipped": skipped,
    }
    bench_report.print_end(outcome, console)
    if config.out is not None:
        config.out.mkdir(parents=True, exist_ok=True)
        (config.out / "results.json").write_text(json.dumps(outcome, indent=2) + "\n", "utf-8")
        bench_report.write_report(outcome, config.out)
        console.print(f"written: {config.out / 'report.html'}")
    if not all(result["agree"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(BenchConfig))
