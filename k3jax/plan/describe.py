"""A plan as plain data: the `--json` output, from which tables and pictures are made."""

import dataclasses
from typing import Any

import meshes
from k3jax.plan.constraints import mesh_findings
from k3jax.plan.flops import TRAINING_FACTOR, count_flops_per_token
from k3jax.plan.memory import ALIVE, RECOMPUTED, Memory
from k3jax.plan.search import MEMORY_MARGIN, Costed, Plan
from k3jax.plan.timing import MEMORY_EFFICIENCY, PRODUCT_EFFICIENCY, StepTime
from k3jax.plan.traffic import FETCHED_SHARE, HIDDEN


def describe_plan(plan: Plan, model: str) -> dict[str, Any]:
    """Everything about a plan.

    Args:
        plan: the result of `make_plan`.
        model: its name, for the reader.
    """
    work, chip = plan.work, plan.chips.chip
    return {
        "model": model,
        "use": work.use,
        "batch": work.batch,
        "length": work.length,
        "tokens_per_step": work.tokens,
        "precision": dataclasses.asdict(work.precision),
        "hardware": {
            "name": str(plan.chips),
            "chips": plan.chips.num_chips,
            "devices": plan.chips.num_devices,
            "devices_joined_by_fast_links": plan.chips.node_devices,
            **{
                field.name: getattr(chip, field.name)
                for field in dataclasses.fields(chip)
                if field.name != "name"
            },
        },
        "assumptions": {
            "product_efficiency": PRODUCT_EFFICIENCY,
            "memory_efficiency": MEMORY_EFFICIENCY,
            "memory_margin": MEMORY_MARGIN,
            "fetched_share": FETCHED_SHARE,
            "hidden_share": dict(HIDDEN),
            "arrays_alive": {"once": ALIVE} | RECOMPUTED,
        },
        "considered": plan.considered,
        "meshes": [
            describe_mesh(plan, costed, rank) for rank, costed in enumerate(plan.ranked, start=1)
        ],
        "refused": [dataclasses.asdict(refusal) for refusal in plan.refusals],
    }


def describe_mesh(plan: Plan, costed: Costed, rank: int) -> dict[str, Any]:
    """One of the ranked meshes."""
    work, candidate, seconds = plan.work, costed.candidate, costed.time.total
    return {
        "rank": rank,
        "mesh": dict(zip(meshes.AXES, candidate.shape.sizes)),
        "micro_batches": candidate.micro_batches,
        "pipeline_micro_batches": candidate.pipeline_micro_batches,
        "whole_weights": candidate.whole_weights,
        "rows_on_expert": candidate.rows_on_expert,
        "transport": costed.transport,
        "node_size": costed.node_size,
        "memory": _memory(costed.memory),
        "seconds": _seconds(costed.time),
        "bottleneck": costed.time.bottleneck(),
        "flops_per_device": costed.time.flops,
        "tokens_per_second": work.tokens / seconds,
        "model_flops_utilization": model_flops(plan)
        / (plan.chips.num_devices * plan.chips.chip.peak_flops * seconds),
        "transfers": [
            dataclasses.asdict(transfer) | {"exposed_seconds": transfer.exposed_seconds}
            for transfer in costed.transfers
        ],
        "findings": [
            dataclasses.asdict(finding) for finding in mesh_findings(work, plan.chips, candidate)
        ],
    }


def model_flops(plan: Plan) -> float:
    """Operations of a step that the model asks for, nothing recomputed or padded."""
    work = plan.work
    per_token = count_flops_per_token(work.cfg, length=work.length).forward
    return per_token * work.tokens * (TRAINING_FACTOR if work.use == "training" else 1)


def _memory(memory: Memory) -> dict[str, int]:
    return dataclasses.asdict(memory) | {"arguments": memory.arguments, "total": memory.total}


def _seconds(time: StepTime) -> dict[str, Any]:
    parts = {f.name: getattr(time, f.name) for f in dataclasses.fields(time) if f.name != "flops"}
    return parts | {"total": time.total}
