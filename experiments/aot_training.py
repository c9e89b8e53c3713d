"""Compile the whole training step of Kimi K3 for pods that are not here, and report its memory.

    python -m experiments.aot_training                          # every machine of the table
    python -m experiments.aot_training --machine v5p-512        # one of them
    python -m experiments.aot_training --chips v5p:8x8x8 --mesh.fsdp 8 --mesh.expert 64 --batch 512

Needs the extra `aot`, up to 12 GB of host memory and a few minutes of two cores for each machine;
one is compiled after the other, each in a process of its own.
"""

import dataclasses
import json
import os
import pathlib
import resource
import subprocess
import sys
from typing import Literal

import tyro

import meshes
from k3jax.train.machines import MeshConfig
from meshes import MeshShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Chips, how they are used, and a batch for them."""

    chips: str
    shape: MeshShape
    batch: int
    length: int = 8192
    micro_batches: int = 1
    rule: str = "momentum"
    parallel: dict = dataclasses.field(default_factory=dict)  # fields of `k3jax.ops.Parallel`
    is_shallow: bool = False  # `shallow_k3` in place of all layers


MACHINES = {
    "v5p-512": Machine(chips="v5p:8x8x8", shape=MeshShape(fsdp=8, expert=64), batch=512),
    # 7168 divides by 64, not by 64 x 64: what is no routed expert lies in 64 pieces.
    "v5p-4096": Machine(chips="v5p:16x16x16", shape=MeshShape(fsdp=64, expert=64), batch=4096),
    "tpu7x-512": Machine(chips="tpu7x:8x8x8", shape=MeshShape(fsdp=16, expert=64), batch=1024),
    "h200-1024": Machine(chips="h200:1024", shape=MeshShape(fsdp=16, expert=64), batch=1024),
    "v5p-2048": Machine(chips="v5p:8x16x16", shape=MeshShape(fsdp=32, expert=64), batch=2048),
    "v5p-1024-context": Machine(
        chips="v5p:8x8x16", shape=MeshShape(fsdp=4, expert=64, context=4), batch=256, length=32768
    ),
    "v5p-1024-tensor": Machine(
        chips="v5p:8x8x16", shape=MeshShape(fsdp=4, expert=64, tensor=4), batch=256
    ),
    "v5p-1024-adamw": Machine(
        chips="v5p:8x8x16", shape=MeshShape(fsdp=16, expert=64), batch=1024, rule="adamw"
    ),
    "v5p-1024-tensor2": Machine(
        chips="v5p:8x8x16", shape=MeshShape(fsdp=8, expert=64, tensor=2), batch=512
    ),
    "h200-2048": Machine(chips="h200:2048", shape=MeshShape(fsdp=32, expert=64), batch=2048),
}


def shallow_k3():
    """Kimi K3 at its full widths: one written-out layer, a scan over two with experts."""
    from k3jax.config import K3Config

    return dataclasses.replace(
        K3Config.kimi_k3(),
        num_layers=3,
        kda_layers=(1,),
        full_attention_layers=(2, 3),
        attention_residual_block=2,
        vision=None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AotTrainingConfig:
    """Compile training steps ahead of time and print a table."""

    machine: tuple[str, ...] = ()
    """Names from the table; all of them by default."""
    chips: str | None = None
    """Other chips, for example v5p:8x8x8 or h200:1024, with the mesh and batch below."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    batch: int = 512
    length: int = 8192
    micro_batches: int = 1
    json: pathlib.Path | None = None
    """Also write the numbers to this file, after each machine."""
    text: pathlib.Path | None = None
    """Folder for the scheduled programs."""
    level: Literal["O1", "O2", "O3"] | None = None
    """Optimization level; a job's by default. O1 compiles for TPUs in a third of the time, but
    nothing then runs beside a collective."""


_RECORD = "step record: "


def compile_machine(
    name: str, machine: Machine, text: pathlib.Path | None = None, level: str | None = None
) -> dict:
    """Compile in a fresh process whose environment fits; what it says, or "error".

    Args:
        name: of the record.
        machine: what to compile.
        text: file for the scheduled program.
        level: optimization level, see `meshes.ahead_of_time_environment`.
    """
    environment = os.environ | meshes.ahead_of_time_environment(level)
    environment.pop("XLA_FLAGS", None)
    question = dataclasses.asdict(machine) | {"text": str(text) if text else None}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.aot_training", "--worker", json.dumps(question)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=pathlib.Path(__file__).parents[1],
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith(_RECORD)]
    described = {"name": name, "level": level} | dataclasses.asdict(machine)
    if not found:
        return described | {"error": done.stdout[-2000:] or f"status {done.returncode}"}
    return described | json.loads(found[-1].removeprefix(_RECORD))


def _worker(question: dict) -> None:
    """Compile one step and print a record after the compilers' own output."""
    from k3jax.config import K3Config
    from k3jax.ops import Parallel
    from k3jax.train.abstract import compile_step
    from k3jax.train.config import OptimizerConfig

    text = question.pop("text")
    try:
        step = compile_step(
            shallow_k3() if question["is_shallow"] else K3Config.kimi_k3(),
            MeshShape(**question["shape"]),
            question["chips"],
            batch=question["batch"],
            length=question["length"],
            micro_batches=question["micro_batches"],
            optimizer=OptimizerConfig(rule=question["rule"]),
            parallel=Parallel(**question["parallel"]),
        )
    except Exception as error:
        record = {"error": f"{type(error).__name__}: {error}"[:4000]}
    else:
        program = step.text
        if text is not None:
            pathlib.Path(text).write_text(program, encoding="utf-8")
        record = dataclasses.asdict(step.memory) | {
            "lower_seconds": step.lower_seconds,
            "compile_seconds": step.compile_seconds,
            "collectives": meshes.count_collectives(program),
            "overlapped": meshes.count_overlaps(program),
        }
    # What the process used of the host; kilobytes on Linux.
    record["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("\n" + _RECORD + json.dumps(record), flush=True)


def main(config: AotTrainingConfig) -> None:
    """Compile, print a table, and end with status 1 when a step does not compile or fit."""
    from rich.console import Console
    from rich.table import Table

    machines = {name: MACHINES[name] for name in config.machine or MACHINES}
    if config.chips is not None:
        machine = Machine(
            chips=config.chips, shape=config.mesh.shape(), batch=config.batch,
            length=config.length, micro_batches=config.micro_batches,
        )  # fmt: skip
        machines = {config.chips: machine}
    if config.text is not None:
        config.text.mkdir(parents=True, exist_ok=True)
    table = Table(title="training step of Kimi K3, per device")
    for column in ("machine", "mesh", "rows x tokens", "arguments", "temporaries", "peak",
                   "capacity", "compiled in", "host"):  # fmt: skip
        table.add_column(column)
    records, fits = [], True
    for name, machine in machines.items():
        text = None if config.text is None else config.text / f"{name}.txt"
        record = compile_machine(name, machine, text, config.level)
        capacity = meshes.hardware(machine.chips).chip.memory_bytes
        records.append(record | {"capacity": capacity})
        sizes = {axis: n for axis, n in dataclasses.asdict(machine.shape).items() if n > 1}
        head = (name, " ".join(f"{axis} {n}" for axis, n in sizes.items()),
                f"{machine.batch} x {machine.length}")  # fmt: skip
        if "error" in record:
            fits = False
            table.add_row(*head, record["error"][:300])
        else:
            fits &= record["peak"] <= capacity
            table.add_row(
                *head, *(f"{record[k] / 1e9:.1f} GB" for k in ("arguments", "temporaries", "peak")),
                f"{capacity / 1e9:.1f} GB", f"{record['compile_seconds']:.0f} s",
                f"{record['host_bytes'] / 1e9:.1f} GB",
            )  # fmt: skip
        if config.json is not None:
            config.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    Console().print(table)
    if not fits:
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _worker(json.loads(sys.argv[2]))
    else:
        main(tyro.cli(AotTrainingConfig))
