"""Find tile sizes for a device and write them to its table.

    python -m experiments.tune_kernels                      # this machine's device: by time
    python -m experiments.tune_kernels --op kda --dry       # look, write nothing
    python -m experiments.tune_kernels --chip v6e           # a TPU that is not here

With the device at hand the candidates of a call take turns in one process and the fastest median
wins; candidates that do not compile or whose results differ are named and left out. For a TPU that
is not here the static schedule stands in for the time: bundles of the kernel body times grid steps
(loops inside a kernel count once, so candidates must not differ in them), never below the time of
its HBM traffic. For a GPU that is not here candidates are only compiled: those that spill registers
are named, nothing is written. Tables: pallas_kernels/tiles/<device>.json.
"""

import dataclasses
import functools
import json

import jax
import tyro
from rich.console import Console
from rich.table import Table

from experiments.aot_kernels import compile_cases
from experiments.bench_kernels import AGREEMENT, difference_of, precision_of
from experiments.kernel_cases import KernelCase, check_chip, choose_cases, find_cases
from experiments.timing import time_interleaved
from pallas_kernels.device import current_device
from pallas_kernels.tiles import TABLES, read_table, with_tiles
from pallas_kernels.traffic import count_traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Choose tiles of the kernels and write the device's table."""

    op: str | None = None
    """Only this op."""
    chip: str | None = None
    """A TPU that is not here (v5e, v5p, v6e, tpu7x): tune by its compiler's schedule."""
    size: str = "k3"
    """Shapes to tune for: k3 or small."""
    rounds: int = 5
    """Turns of each candidate."""
    dry: bool = False
    """Print only."""


def tune_here(config: TuneConfig, console: Console) -> dict[str, dict[str, int]]:
    """Time the candidates of every call on this machine's device; return kernel -> fields."""
    platform = current_device().platform
    seconds: dict[str, dict] = {}
    for case in find_cases(op=config.op, size=config.size):
        for kernel, options in case.candidates.items():
            if not kernel.endswith(platform):
                continue
            for tiles, value in _time_candidates(case, kernel, options, config, console).items():
                seconds.setdefault(kernel, {}).setdefault(tiles, []).append(value)
    return _choose(seconds, "seconds", console)


def _time_candidates(case: KernelCase, kernel: str, options, config: TuneConfig, console: Console):
    """Return tiles -> median seconds of one call, of those that run and agree with XLA."""
    name = f"mosaic_{current_device().platform}"
    inputs = jax.block_until_ready(jax.jit(case.make_inputs)())
    expected = jax.jit(case.function("xla"))(*inputs)
    calls = {}
    for tiles in options:
        form = case.function(name)
        try:
            with with_tiles(**{kernel: tiles}):
                # A function of its own: jax would reuse what it traced with other tiles.
                program = jax.jit(lambda *x, form=form: form(*x)).lower(*inputs).compile()
        except Exception as error:
            console.print(f"{case.title}: {tiles} does not compile: {str(error)[:300]}")
            continue
        difference = difference_of(program(*inputs), expected)
        if difference > AGREEMENT[precision_of(inputs)]:
            console.print(f"[red]{case.title}: {tiles} is off by {difference:.1e}: left out[/]")
            continue
        calls[tiles] = functools.partial(program, *inputs)
    return time_interleaved(calls, config.rounds, least_seconds=0.02)


def tune_by_schedule(config: TuneConfig, console: Console) -> dict[str, dict[str, int]]:
    """Compile the candidates for a chip that is not here; return kernel -> fields (TPU only)."""
    records = compile_cases(
        config.chip, op=config.op, size=config.size, schedule=config.chip != "h200", candidates=True
    )
    cases = {case.title: case for case in find_cases(op=config.op, size=config.size)}
    cost: dict[str, dict] = {}
    for record in records:
        case, kernel = cases[record["case"]], record["kernel"]
        tiles = case.candidates[kernel][record["candidate"]]
        spilled = sum(k.get("spilled_bytes", 0) for k in record.get("kernels", {}).values())
        if "error" in record or spilled:
            reason = record.get("error") or f"spills {spilled} bytes"
            console.print(f"{case.title}: {tiles}: {reason[:300]}")
            continue
        if "bundles" not in record:
            continue
        with with_tiles(**{kernel: tiles}):
            form = case.function("mosaic_tpu")
            work = _scheduled_seconds(form, case.specs(), record["bundles"], config.chip)
        cost.setdefault(kernel, {}).setdefault(tiles, []).append(work)
    return _choose(cost, "seconds by schedule", console)


# Clock in Hz and HBM bytes per second of the TPUs; published figures, for ranking candidates only.
_TPU_RATES = {
    "v5e": (1.5e9, 0.82e12),
    "v5p": (1.75e9, 2.77e12),
    "v6e": (1.75e9, 1.64e12),
    "tpu7x": (1.9e9, 3.7e12),
}


def _scheduled_seconds(function, specs, bundles: dict[str, int], chip: str) -> float:
    """Sum over the Pallas calls of max(bundles x grid steps / clock, bytes / bandwidth)."""
    clock, bandwidth = _TPU_RATES[chip]
    return sum(
        max(bundles.get(call.name, 0) * call.steps / clock, call.bytes / bandwidth)
        for call in count_traffic(function, *specs)
    )


def _choose(cost: dict[str, dict], unit: str, console: Console) -> dict[str, dict[str, int]]:
    """Print every kernel's candidates and return the fields of the best of those that always ran.

    A candidate is judged by the sum over the calls of its kernel.
    """
    chosen = {}
    for kernel, candidates in cost.items():
        most = max(len(values) for values in candidates.values())
        complete = {t: sum(v) for t, v in candidates.items() if len(v) == most}
        table = Table(title=kernel, title_justify="left")
        table.add_column("tiles")
        table.add_column(unit, justify="right")
        for tiles, value in sorted(complete.items(), key=lambda item: item[1]):
            table.add_row(str(dataclasses.asdict(tiles)), f"{value * 1e3:.3f} ms")
        console.print(table)
        chosen[kernel] = dataclasses.asdict(min(complete, key=complete.get))
    return chosen


def main(config: TuneConfig) -> None:
    """Tune, print, and write the table unless told not to."""
    console = Console()
    choose_cases(op=config.op, size=config.size)
    if config.chip is not None:
        check_chip(config.chip)
    device = config.chip or current_device().name
    if config.chip is None and current_device().platform == "cpu":
        raise SystemExit(
            "this machine has no TPU or GPU to tune for; name a chip to tune by its compiler: "
            "--chip v6e"
        )
    chosen = (tune_by_schedule if config.chip else tune_here)(config, console)
    if not chosen:
        console.print("nothing to write: no kernel of these calls has candidates that ran")
        return
    if config.dry:
        return
    table = read_table(device) | chosen
    file = TABLES / f"{device}.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(file)
    console.print(f"{file}: {len(chosen)} kernels written")


if __name__ == "__main__":
    main(tyro.cli(TuneConfig))
