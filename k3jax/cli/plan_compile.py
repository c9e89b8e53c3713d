"""`k3jax plan --compile`: the compiler's own figures for the best meshes, each in its own process.

A compilation needs environment variables before jax starts, several gigabytes, and minutes; run as
a program this module compiles one mesh and prints one line of JSON.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

import meshes
from k3jax.plan.picture import mesh_label
from k3jax.plan.search import Plan

# Machines that a compiler here can be told about; simulated devices are compiled for themselves.
DESCRIBED = ("v5e", "v5p", "v6e", "tpu7x", "h200", "cpu")
TIME_LIMIT = 1800  # seconds per mesh


def compile_meshes(
    plan: Plan, facts: dict[str, Any], count: int, *, level: str | None, quiet: bool
) -> list[dict[str, Any]]:
    """Compile the step for the first `count` meshes of a plan.

    Args:
        plan: the plan.
        facts: its description (`describe_plan`).
        count: how many.
        level: how much the compiler optimizes, see `meshes.ahead_of_time_environment`.
        quiet: no progress on stderr.

    Returns:
        One table per mesh: "label", "status" ("compiled" or "NOT RUN", then with "reason"), and
        compiled and predicted bytes of arguments and peak.
    """
    from rich.console import Console

    results = []
    for mesh in facts["meshes"][:count]:
        label = mesh_label(mesh)
        reason = _cannot(plan, mesh)
        if reason is not None:
            results.append({"label": label, "status": "NOT RUN", "reason": reason})
            continue
        with Console(stderr=True, quiet=quiet).status(f"compiling {label} (minutes)"):
            found = _compile(plan, mesh, level)
        results.append({"label": label} | _compared(found, mesh["memory"]))
    return results


def _cannot(plan: Plan, mesh: dict[str, Any]) -> str | None:
    """Why a mesh cannot be compiled here, None if it can."""
    if plan.work.use != "training":
        return f"only training steps are compiled, this is {plan.work.use}"
    if plan.chips.chip.name not in DESCRIBED:
        return f"no description of {plan.chips.chip.name} for its compiler"
    if plan.chips.slices > 1:
        return f"{plan.chips}: several slices cannot be described; plan one slice"
    return None


def _compared(found: dict[str, Any], predicted: dict[str, int]) -> dict[str, Any]:
    if "reason" in found:
        return {"status": "NOT RUN", "reason": found["reason"]}
    return {
        "status": "compiled",
        **found,
        "predicted_argument_bytes": predicted["arguments"],
        "predicted_peak_bytes": predicted["total"],
        "argument_error": predicted["arguments"] / found["argument_bytes"] - 1,
        "peak_error": predicted["total"] / found["peak_bytes"] - 1,
    }


def _compile(plan: Plan, mesh: dict[str, Any], level: str | None) -> dict[str, Any]:
    """The figures of one mesh, from another process."""
    work, chips = plan.work, plan.chips
    task = {
        "model": work.cfg.to_hf(),
        "hardware": str(chips),
        "batch": work.batch,
        "length": work.length,
        "precision": vars(work.precision),
        **{
            key: mesh[key]
            for key in ("mesh", "micro_batches", "pipeline_micro_batches", "transport", "node_size")
        },
    }
    environment = os.environ | meshes.ahead_of_time_environment(level)
    if chips.chip.name == "cpu":
        flag = f"--xla_force_host_platform_device_count={chips.num_devices}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}".strip()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "k3jax.cli.plan_compile"],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            env=environment,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"not compiled after {TIME_LIMIT} seconds"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        # Libraries log to stderr, too, also when nothing is wrong.
        said = [line for line in done.stderr.splitlines() if not re.match(r"[IWE]\d{4} ", line)]
        last = said[-1] if said else "no message"
        return {"reason": f"the compiling process ended with {done.returncode}: {last}"}
    return json.loads(lines[-1])


def compile_task(task: dict[str, Any]) -> dict[str, Any]:
    """Compile one mesh in this process: bytes of arguments, temporaries and peak, and seconds."""
    from k3jax.config import K3Config
    from k3jax.ops import Parallel
    from k3jax.train.abstract import compile_step
    from k3jax.train.config import OptimizerConfig
    from k3jax.train.precision import PrecisionConfig

    precision = task["precision"]
    compiled = compile_step(
        K3Config.from_hf_dict(task["model"]),
        meshes.MeshShape(**task["mesh"]),
        task["hardware"],
        batch=task["batch"],
        length=task["length"],
        micro_batches=task["micro_batches"],
        # Muon's moments and the size of its update, without the orthogonalisation.
        optimizer=OptimizerConfig(
            rule="adamw" if precision["optimizer"] == "adamw" else "momentum"
        ),
        precision=PrecisionConfig(
            **{name: precision[name] for name in ("parameters", "master", "momentum")}
        ),
        parallel=Parallel(
            transport=task["transport"],
            node_size=task["node_size"],
            pipeline_micro_batches=(
                task["pipeline_micro_batches"] if task["mesh"]["stage"] > 1 else None
            ),
        ),
    )
    memory = compiled.memory
    peak = memory.peak
    if task["hardware"].startswith("cpu"):  # that compiler leaves temporaries out of its peak
        peak = memory.arguments + memory.temporaries
    return {
        "argument_bytes": memory.arguments,
        "temporary_bytes": memory.temporaries,
        "peak_bytes": peak,
        "seconds": compiled.lower_seconds + compiled.compile_seconds,
    }


def main() -> int:
    """Compile the mesh described on standard input; print its figures as one line."""
    task = json.loads(sys.stdin.read())
    try:
        figures = compile_task(task)
    except ValueError as error:  # a chip that cannot be described, sizes that do not divide
        figures = {"reason": " ".join(str(error).split())}
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        figures = {"reason": f"out of memory: {' '.join(str(error).split())[:400]}"}
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
