"""Training steps per second on eight simulated devices against one, at the same global batch.

    python -m experiments.bench_meshes                          # all three axes, about 6 minutes
    python -m experiments.bench_meshes --axes expert            # one of them
    python -m experiments.bench_meshes --json results.json

The eight devices share the processor of one, so nothing can become faster: what is lost is the
price of collectives, of smaller products and of what every device computes again. At least 0.7 of
the speed of one device should remain. All programs take the same steps from the same weights in
turns, and losses and gradient norms must agree.

Beside other work a program of eight threads gets more of the cores than one of two, and looks
faster than it is: believe speeds of a quiet machine only. Processor time does not depend on it so.
"""

import os

# Before jax starts. Asynchronous dispatch can deadlock devices that outnumber the cores.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import contextlib
import dataclasses
import json
import pathlib
import statistics
import time
from typing import Literal

import jax
import numpy as np
import tyro

import meshes
from experiments.bench_training import k3_like
from k3jax.ops import Parallel
from k3jax.train.config import TrainConfig
from k3jax.train.state import ModelParts
from k3jax.train.step import make_train_step

DEVICES = 8
WANTED = 0.7
TOLERANCE = 1e-4  # of losses and gradient norms, over all steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to time; medians over steps taken in turns within one process."""

    axes: tuple[Literal["data", "fsdp", "expert", "context", "tensor"], ...] = (
        "fsdp",
        "expert",
        "context",
    )
    """Mesh axes that get all eight devices, one after the other."""
    layers: int = 5
    """Layers of the model: K3's pattern."""
    dim: int = 192
    """Its width; heads of a third of it, 32 experts."""
    batch: int = 8
    """Rows (B)."""
    length: int = 512
    """Tokens per row (T)."""
    steps: int = 5
    """Timed steps of each program, after one that is not."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes."""
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    """Transport, attention over context and so on."""
    json: pathlib.Path | None = None
    """Also write the numbers to this file."""


class Program:
    """A compiled training step and its state, on one device or on eight along one axis."""

    def __init__(self, config: BenchConfig, axis: str | None):
        self.mesh = None
        if axis is not None:
            self.mesh = meshes.build_mesh(meshes.MeshShape(**{axis: DEVICES}), jax.devices())
        train = TrainConfig(
            batch=config.batch,
            length=config.length,
            remat=config.remat,
            parallel=config.parallel,
        )
        parts = ModelParts(k3_like(config.layers, dim=config.dim))
        step, optimizer = make_train_step(parts, train)
        with self.in_mesh():
            self.state = parts.fresh_state(optimizer, 0)
            batch = self.placed(np.zeros((config.batch, config.length), np.int32))
            used = 1 if self.mesh is None else self.mesh.size
            options = meshes.compile_options("cpu", local_devices=used)
            begin = time.perf_counter()
            lowered = jax.jit(step, donate_argnums=0).lower(self.state, batch)
            self.step = lowered.compile(compiler_options=options)
        self.compile_seconds = time.perf_counter() - begin
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.records: list[tuple[float, float]] = []
        self.parameters = sum(array.size for array in self.state.params.values())

    def in_mesh(self):
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def placed(self, tokens: np.ndarray) -> dict[str, jax.Array]:
        batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens)}
        if self.mesh is None:
            return jax.device_put(batch)
        spec = meshes.AxisRules().spec(("batch", "tokens"))
        return jax.device_put(batch, jax.NamedSharding(self.mesh, spec))

    def advance(self, tokens: np.ndarray) -> None:
        """One step, timed, with what it measured."""
        with self.in_mesh():
            batch = jax.block_until_ready(self.placed(tokens))
            begin, used = time.perf_counter(), time.process_time()
            self.state, metrics = self.step(self.state, batch)
            jax.block_until_ready((self.state, metrics))
            self.seconds.append(time.perf_counter() - begin)
            self.processor_seconds.append(time.process_time() - used)
        self.records.append((float(metrics["loss"]), float(metrics["grad_norm"])))


def measure(config: BenchConfig) -> dict:
    """Run everything; refuses to report programs that do not agree."""
    programs = {"one device": Program(config, None)}
    for axis in config.axes:
        programs[f"{axis} {DEVICES}"] = Program(config, axis)
    generator = np.random.default_rng(0)
    for _ in range(config.steps + 1):
        tokens = generator.integers(0, 256, (config.batch, config.length), dtype=np.int32)
        for program in programs.values():
            program.advance(tokens)
    single = programs["one device"]
    seconds = {name: statistics.median(p.seconds[1:]) for name, p in programs.items()}
    used = {name: statistics.median(p.processor_seconds[1:]) for name, p in programs.items()}
    result = {
        "config": dataclasses.asdict(config) | {"json": str(config.json)},
        "parameters": single.parameters,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "one_device": {
            "step_seconds": seconds["one device"],
            "processor_seconds": used["one device"],
            "compile_seconds": single.compile_seconds,
        },
        "meshes": {},
    }
    for name, program in list(programs.items())[1:]:
        found, wanted = np.array(program.records), np.array(single.records)
        difference = float(np.max(np.abs(found - wanted) / wanted))
        if not difference <= TOLERANCE:
            raise SystemExit(
                f"{name}: losses and gradient norms differ from one device by {difference:.1e} "
                f"(allowed {TOLERANCE}): {found.tolist()} against {wanted.tolist()}"
            )
        result["meshes"][name] = {
            "step_seconds": seconds[name],
            "processor_seconds": used[name],
            "compile_seconds": program.compile_seconds,
            "relative_speed": seconds["one device"] / seconds[name],
            "relative_work": used[name] / used["one device"],
            "largest_difference": difference,
        }
    return result


def main() -> None:
    config = tyro.cli(BenchConfig, description=__doc__)
    # Collectives of devices that outnumber the cores can otherwise wait for each other forever.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    result = measure(config)
    print(
        f"{result['parameters']:,} parameters, {config.batch} x {config.length} tokens, "
        f"{result['cores']} cores with a load of {result['load']:.1f}"
    )
    single = result["one_device"]
    print(
        f"{'one device':>12}: {single['step_seconds']:.3f} s per step "
        f"({single['processor_seconds']:.2f} s of processor time)"
    )
    for name, found in result["meshes"].items():
        print(
            f"{name:>12}: {found['step_seconds']:.3f} s per step, {found['relative_speed']:.2f} of "
            f"the speed of one device (at least {WANTED}), {found['relative_work']:.2f} times its "
            f"processor time, losses and gradient norms within {found['largest_difference']:.0e}"
        )
    if config.json:
        config.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
