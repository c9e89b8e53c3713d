"""Which axis sizes a model, a batch and a machine allow, and why others do not work."""

import dataclasses
import math
from collections.abc import Mapping

import meshes
from k3jax.plan.local import Candidate, uniform_segment
from k3jax.plan.workload import Workload
from meshes.placement import slice_counts
from meshes.schedule import pipeline_cost

# Tokens of a KDA tile: shorter pieces of a sequence would be mostly padding.
SHORTEST_PIECE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What one constraint says about one mesh, or one size of one axis."""

    axis: str  # a mesh axis, or "batch", "memory"
    verdict: str  # "fits", "costs" (works, with waste that is charged), "refused"
    text: str


def axis_findings(work: Workload, chips: meshes.Hardware, axis: str, size: int) -> list[Finding]:
    """What speaks for or against `size` devices along one axis, whatever the other axes are."""
    if size == 1:
        return []
    found = {
        meshes.TENSOR: _tensor,
        meshes.EXPERT: _expert,
        meshes.CONTEXT: _context,
        meshes.STAGE: _stage,
    }.get(axis, lambda *_: [])(work, size)
    if axis in (meshes.TENSOR, meshes.CONTEXT) and size > chips.node_devices:
        found.append(
            _refused(
                axis,
                f"{axis} {size} leaves the {chips.node_devices} devices that fast links join: each "
                "layer would wait for the network",
            )
        )
    return found


def _refused(axis: str, text: str) -> Finding:
    return Finding(axis=axis, verdict="refused", text=text)


def _divides(axis: str, size: int, counts: Mapping[str, int]) -> list[Finding]:
    bad = {name: n for name, n in counts.items() if n % size}
    if bad:
        listed = ", ".join(f"{n} {name}" for name, n in bad.items())
        return [_refused(axis, f"{axis} {size} does not divide {listed}")]
    listed = ", ".join(f"{n} {name} -> {n // size}" for name, n in counts.items())
    return [Finding(axis=axis, verdict="fits", text=f"{axis} {size}: per device {listed}")]


def _tensor(work: Workload, size: int) -> list[Finding]:
    cfg = work.cfg
    counts = {}
    if cfg.kda_layers:
        counts["KDA heads"] = cfg.kda.num_heads
    if cfg.full_attention_layers:
        counts["MLA heads"] = cfg.mla.num_heads
    if cfg.num_moe_layers < cfg.num_layers:
        counts["dense hidden channels"] = cfg.ffn_dim
    if cfg.moe:
        counts["expert hidden channels"] = cfg.moe.expert_hidden_dim
    return _divides(meshes.TENSOR, size, counts | {"vocabulary rows": cfg.vocab_size})


def _expert(work: Workload, size: int) -> list[Finding]:
    moe = work.cfg.moe
    if moe is None:
        return [_refused(meshes.EXPERT, f"expert {size}: the model has no routed experts")]
    return _divides(meshes.EXPERT, size, {"routed experts": moe.num_experts})


def _context(work: Workload, size: int) -> list[Finding]:
    axis, length = meshes.CONTEXT, work.length
    if work.use == "decode":
        return [_refused(axis, f"context {size}: a step of decoding has one token per sequence")]
    if length < size * SHORTEST_PIECE:
        return [
            _refused(
                axis,
                f"context {size} cuts {length} tokens into pieces of {length // size}, shorter "
                f"than a tile of {SHORTEST_PIECE}",
            )
        ]
    return []


def _stage(work: Workload, size: int) -> list[Finding]:
    axis, segment = meshes.STAGE, uniform_segment(work.cfg)
    if work.use != "training":
        return [_refused(axis, f"stage {size}: pipelines are for training")]
    units = segment.repeats if segment else 0
    if size > units:
        return [_refused(axis, f"stage {size} exceeds the {units} repeating units of the model")]
    padded = -(-units // size) * size
    outside = work.cfg.num_layers - segment.num_layers
    text = f"stage {size}: {units} units of {len(segment.unit)} layers"
    if padded != units:
        text += f" padded to {padded} ({padded - units} identities)"
    text += f", {padded // size} per stage; {outside} layers outside"
    return [Finding(axis=axis, verdict="costs" if padded != units else "fits", text=text)]


def mesh_findings(
    work: Workload, chips: meshes.Hardware, candidate: Candidate
) -> tuple[Finding, ...]:
    """Everything that constrains one mesh; it can be used when nothing is "refused"."""
    shape = candidate.shape
    found = []
    for axis, size in zip(meshes.AXES, shape.sizes):
        found += axis_findings(work, chips, axis, size)
    found += joint_findings(work, chips, candidate)
    found += _length(work, candidate)
    segment = uniform_segment(work.cfg)
    if shape.stage > 1 and segment and shape.stage <= segment.repeats:
        parts = candidate.pipeline_micro_batches
        cost = pipeline_cost(segment.repeats, shape.stage, parts)
        found.append(
            Finding(
                axis=meshes.STAGE,
                verdict="costs",
                text=f"{parts} parts in the pipeline: {100 * cost.bubble:.1f} % of the "
                f"pipeline's steps are bubbles, {100 * cost.padding:.1f} % identities",
            )
        )
    return tuple(found)


def joint_findings(
    work: Workload, chips: meshes.Hardware, candidate: Candidate
) -> tuple[Finding, ...]:
    """Constraints on several axes together that can refuse a mesh."""
    found = _batch(work, candidate)
    if chips.slices > 1:
        try:
            slice_counts(candidate.shape.sizes, chips.slices)
        except ValueError as error:
            found.append(_refused("slices", str(error)))
    return tuple(found)


def _batch(work: Workload, candidate: Candidate) -> list[Finding]:
    shape = candidate.shape
    sizes = {"data": shape.data, "fsdp": shape.fsdp}
    if candidate.rows_on_expert:
        sizes["expert"] = shape.expert
    sizes["micro-batches"] = candidate.micro_batches
    # Outside of a pipeline its stages share the rows, inside they come in parts.
    sizes["parts of the pipeline"] = math.lcm(shape.stage, candidate.pipeline_micro_batches)
    parts = math.prod(sizes.values())
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    product = product or "one device"
    if work.batch % parts:
        below = work.batch // parts * parts
        options = " or ".join(str(n) for n in (below, below + parts) if n)
        return [
            _refused(
                "batch",
                f"batch {work.batch} does not divide by {product} = {parts}; a batch of {options} "
                "would, or more devices on context or tensor",
            )
        ]
    text = f"batch {work.batch} / ({product}) = {work.batch // parts}"
    return [Finding(axis="batch", verdict="fits", text=text)]


def _length(work: Workload, candidate: Candidate) -> list[Finding]:
    pieces = candidate.shape.context * candidate.shape.tensor
    if work.use == "decode" or pieces == 1:
        return []
    context, tensor = candidate.shape.context, candidate.shape.tensor
    padded = -(-work.length // pieces) * pieces
    text = f"context {context} x tensor {tensor}: {padded // pieces} tokens of the residual stream"
    if padded == work.length:
        return [Finding(axis=meshes.CONTEXT, verdict="fits", text=f"{text} per device")]
    text += f" per device, {padded - work.length} of {padded} are padding"
    return [Finding(axis=meshes.CONTEXT, verdict="costs", text=text)]
