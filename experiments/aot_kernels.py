"""Compile the kernels for chips that are not here, and report what the compilers say.

    python -m experiments.aot_kernels --chip v6e                 # every K3 shape
    python -m experiments.aot_kernels --chip h200 --op kda       # one op
    python -m experiments.aot_kernels --chip v6e --op kda --schedule
                                                 # also bundles of the static schedule (TPU)

Needs the extra `aot`. For TPU a kernel that needs too much vector memory does not compile; for GPU
registers, spilled bytes and shared memory of every kernel are read from ptxas.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import tyro

import meshes


@dataclasses.dataclass(frozen=True, kw_only=True)
class AotConfig:
    """Compile kernels ahead of time and print a table."""

    chip: str = "v6e"
    """v5e, v5p, v6e, tpu7x or h200."""
    op: str | None = None
    """Only this op."""
    name: str | None = None
    """Only cases whose name contains this."""
    size: str = "k3"
    """Which shapes: k3 or small."""
    schedule: bool = False
    """TPU: also count the bundles of each kernel's static schedule (large dumps meanwhile)."""
    json: pathlib.Path | None = None
    """Also write all numbers to this file."""


def compile_cases(
    chip: str, *, op: str | None = None, name: str | None = None, size: str = "k3",
    schedule: bool = False, candidates: bool = False,
) -> list[dict]:  # fmt: skip
    """Compile in a fresh process whose environment fits, and return one record per case.

    A record holds "case", "seconds", "temporary_bytes" and "peak_bytes" or "error"; for a GPU
    "kernels": name -> {"registers", "spilled_bytes"}; with `schedule` "bundles": name -> count.
    With `candidates` there is a record per tile candidate of each case instead, which also holds
    "kernel" and "candidate", its number.

    Raises:
        RuntimeError: the process failed as a whole; the message ends with its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | meshes.ahead_of_time_environment()
        environment.pop("XLA_FLAGS", None)
        if chip == "h200":
            environment["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        if schedule:
            environment["LIBTPU_INIT_ARGS"] = (
                f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
            )
        question = {"chip": chip, "op": op, "name": name, "size": size, "folder": folder}
        question["candidates"] = candidates
        done = subprocess.run(
            [sys.executable, "-m", "experiments.aot_kernels", "--worker", json.dumps(question)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=pathlib.Path(__file__).parents[1],
        )  # fmt: skip
    records, log = [], []
    for line in done.stdout.splitlines():
        if line.startswith(_RECORD):
            records.append(json.loads(line.removeprefix(_RECORD)) | _ptxas_report(log))
            log = []
        else:
            log.append(line)
    if done.returncode:
        raise RuntimeError(f"compiling for {chip} failed:\n{done.stdout[-3000:]}")
    return records


_RECORD = "case record: "


def _ptxas_report(log: list[str]) -> dict:
    """Registers and spills by kernel, from the lines that ptxas printed for one case."""
    kernels, kernel = {}, None
    for line in log:
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = kernels.setdefault(match[1].removesuffix("_mosaic_gpu_kernel"), {})
        if kernel is None:
            continue
        if match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            kernel["spilled_bytes"] = int(match[1]) + int(match[2])
        if match := re.search(r"Used (\d+) registers", line):
            kernel["registers"] = int(match[1])
    return {"kernels": kernels} if kernels else {}


def count_bundles(folder: str | pathlib.Path) -> dict[str, int]:
    """Return kernel name -> bundles of its static schedule, from a libtpu dump.

    A loop inside the kernel counts as one turn of its body.
    """
    counts = {}
    for file in pathlib.Path(folder).glob("*-schedule-analysis_final_bundles.txt"):
        name = re.fullmatch(r"\d+-(.+?)(?:\.\d+)?-\d+-schedule-.*", file.name)
        total = re.search(r"total scheduled bundles:\s+(\d+)", file.read_text(errors="replace"))
        if name and total:
            counts[name[1]] = int(total[1])
    return counts


def _worker(question: dict) -> None:
    """Compile each case and print a record after the compilers' own output."""
    import jax

    from experiments.kernel_cases import find_cases
    from pallas_kernels.tiles import with_tiles

    devices = meshes.described_devices(question["chip"])
    mesh = jax.sharding.Mesh(devices[:1], ("device",))
    platform = "gpu" if question["chip"] == "h200" else "tpu"
    for case in find_cases(op=question["op"], size=question["size"]):
        name = f"mosaic_{platform}"
        if name not in case.implementations or (question["name"] or "") not in case.name:
            continue
        variants = [({}, {})]
        if question["candidates"]:
            variants = [
                ({"kernel": kernel, "candidate": number}, {kernel: tiles})
                for kernel, options in case.candidates.items()
                if kernel.endswith(platform)
                for number, tiles in enumerate(options)
            ]
        for labels, tiles in variants:
            with jax.set_mesh(mesh), with_tiles(**tiles):
                record = _compile(case, name, mesh, pathlib.Path(question["folder"]))
            sys.stdout.flush()
            print("\n" + _RECORD + json.dumps({"case": case.title} | labels | record), flush=True)


def _compile(case, implementation: str, mesh, dumps: pathlib.Path) -> dict:
    """Compile one call; what fails is reported, so that one case does not hide the others."""
    import jax

    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=whole), case.specs()
    )
    record, start = {}, time.perf_counter()
    try:
        # A function of its own: jax would reuse what it traced with other tiles.
        form = case.function(implementation)
        program = jax.jit(lambda *inputs: form(*inputs)).lower(*arguments).compile()
        memory = program.memory_analysis()
        record["temporary_bytes"] = memory.temp_size_in_bytes
        record["peak_bytes"] = memory.peak_memory_in_bytes
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"[:2000]
    record["seconds"] = round(time.perf_counter() - start, 1)
    bundles = count_bundles(dumps)
    if bundles:
        record["bundles"] = bundles
    for file in dumps.iterdir():
        file.unlink()
    return record


def main(config: AotConfig) -> None:
    """Compile, print a table, and end with status 1 when a case did not compile."""
    from rich.console import Console
    from rich.table import Table

    from experiments.kernel_cases import check_chip, choose_cases

    check_chip(config.chip)
    kernel = "mosaic_gpu" if config.chip == "h200" else "mosaic_tpu"
    cases = choose_cases(op=config.op, name=config.name, size=config.size)
    if not any(kernel in case.implementations for case in cases):
        raise SystemExit(f"none of these calls runs with {kernel}, the kernels of {config.chip}")
    records = compile_cases(
        config.chip, op=config.op, name=config.name, size=config.size, schedule=config.schedule
    )
    table = Table(title=f"compiled for {config.chip}")
    for column in ("case", "seconds", "temporaries", "kernels"):
        table.add_column(column)
    for record in records:
        notes = record.get("error") or ", ".join(
            [f"{k}: {v.get('registers')} registers, {v.get('spilled_bytes')} bytes spilled"
             for k, v in record.get("kernels", {}).items()]
            + [f"{k}: {v} bundles" for k, v in record.get("bundles", {}).items()]
        )  # fmt: skip
        table.add_row(
            record["case"], f"{record['seconds']:.1f}",
            f"{record.get('temporary_bytes', 0) / 1e6:,.0f} MB", notes,
        )  # fmt: skip
    Console().print(table)
    if config.json is not None:
        config.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    if any("error" in record for record in records):
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _worker(json.loads(sys.argv[2]))
    else:
        main(tyro.cli(AotConfig))
