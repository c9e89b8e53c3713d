"""`k3jax plan`: which mesh, before a chip is booked."""

import dataclasses
import json as json_format
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from k3jax.cli.command import run_command
from k3jax.cli.target import resolve_target
from k3jax.errors import UserError
from k3jax.plan.workload import Precision, Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedAxes:
    """Devices along axes that are not to be searched."""

    stage: int | None = None
    """Pipeline stages, which hold different layers."""
    data: int | None = None
    """Replicas of everything, on other rows of the batch."""
    fsdp: int | None = None
    """Rows of the batch, with parameters and optimizer state stored in pieces."""
    expert: int | None = None
    """Routed experts, and rows of the batch."""
    context: int | None = None
    """Tokens of a sequence."""
    tensor: int | None = None
    """Heads, hidden widths and vocabulary."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Rank the ways to lay a model over many chips: memory, traffic, time, and what limits them.

    Closed-form: nothing is allocated, and no chip is needed. Bytes of parameters, optimizer and
    gradients are exact; activations follow a formula that --compile compares with the compiler's
    own figure; seconds are estimates that rank meshes. What cannot work is listed with the reason.

    A device is what jax shows: a tpu7x chip is two. Axes: data and fsdp cut the batch, expert cuts
    the experts and the batch, context the sequence, tensor heads and hidden widths, stage the
    layers. All bytes and operations are per device and step.

    Try: k3jax plan kimi_k3 --chips h200:1024 --batch 2048 --length 8192 --picture plan.png; or
    with axes given, --chips v5p:4096 --mesh.tensor 8 --mesh.stage 4; or serving, --chips h200:16
    --use decode --precision.experts mxfp4.
    """

    target: Annotated[str, tyro.conf.Positional]
    """Preset (kimi_k3, kimi_linear_48b, small, tiny), config.json, checkpoint or run directory."""
    chips: str
    """Kind and count (v5p:4096, h200:1024, cpu:8), or shape of a slice (v5p:16x16x16), or several
    slices (2*v5p:16x16x16)."""
    batch: int
    """Sequences per step, over all devices and micro-batches."""
    length: int
    """Tokens of each; for decode those that the caches hold."""
    use: Literal["training", "prefill", "decode"] = "training"
    """A training step, a prefill, or one token for every sequence."""
    mesh: FixedAxes = FixedAxes()
    precision: Precision = dataclasses.field(default_factory=Precision)
    micro_batches: int | None = None
    """Parts the batch is computed in; by default as many as memory and the pipeline want."""
    best: int = 5
    """How many meshes to show."""
    compile: int = 0
    """Compile the step for so many of the best meshes ahead of time (extra k3jax[aot]; minutes and
    gigabytes each) and compare memory."""
    compile_level: Literal["O1", "O2", "O3"] | None = "O1"
    """How much --compile optimizes; None as a job does, in three times the time for TPUs. With O1
    no collective runs beside compute, which keeps some 5 % less alive."""
    json: bool = False
    """Print JSON instead of tables."""
    picture: Path | None = None
    """Also draw memory and time of the meshes into this file (png, svg, pdf)."""

    def run(self) -> int:
        """Print the plan."""
        self._check()
        # Nothing here computes: accelerators stay untouched, and jax starts faster.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import meshes
        from k3jax.plan.describe import describe_plan
        from k3jax.plan.search import make_plan

        target = resolve_target(self.target)
        work = Workload(
            cfg=target.cfg,
            use=self.use,
            batch=self.batch,
            length=self.length,
            precision=self.precision,
        )
        try:
            chips = meshes.hardware(self.chips)
        except ValueError as error:
            raise UserError(f"--chips: {error}") from error
        fixed = {axis: n for axis, n in dataclasses.asdict(self.mesh).items() if n is not None}
        with Console(stderr=True, quiet=self.json).status("costing every mesh (seconds)"):
            plan = make_plan(
                work, chips, fixed=fixed, micro_batches=self.micro_batches, best=self.best
            )
        facts = describe_plan(plan, target.name)
        if self.compile:
            from k3jax.cli.plan_compile import compile_meshes

            facts["compiled"] = compile_meshes(
                plan, facts, self.compile, level=self.compile_level, quiet=self.json
            )
        if self.picture is not None:
            from k3jax.plan.picture import draw_plan

            draw_plan(facts, self.picture)
        if self.json:
            print(json_format.dumps(facts, indent=2))
        else:
            _show(facts, self.picture)
        return 0

    def _check(self) -> None:
        for name in ("best", "micro_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')}={value} must be at least 1")
        if self.compile < 0:
            raise UserError(f"--compile={self.compile} must be a number of meshes, 0 for none")
        if self.picture is not None:
            if self.picture.suffix not in (".png", ".svg", ".pdf"):
                raise UserError(f"--picture={self.picture} must end with .png, .svg or .pdf")
            if not self.picture.absolute().parent.is_dir():
                raise UserError(f"--picture={self.picture}: its folder does not exist")


def main(arguments: Sequence[str]) -> int:
    """Run `k3jax plan` with the arguments after its name."""
    return run_command(Plan, "plan", arguments)


def _show(facts: dict[str, Any], picture: Path | None) -> None:
    from k3jax.cli import plan_tables

    console = Console(highlight=False)
    plan_tables.show_header(console, facts)
    plan_tables.show_meshes(console, facts)
    plan_tables.show_best(console, facts, facts["meshes"][0])
    if "compiled" in facts:
        plan_tables.show_compiled(console, facts["compiled"])
    plan_tables.show_refused(console, facts)
    plan_tables.show_command(console, facts, facts["meshes"][0])
    if picture is not None:
        console.print(f"picture: {picture}")
