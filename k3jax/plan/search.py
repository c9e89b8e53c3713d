"""All meshes of a machine, costed and ranked; what was refused, and why."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping

import meshes
from k3jax.errors import UserError
from k3jax.plan.arguments import argument_bytes
from k3jax.plan.constraints import Finding, axis_findings, joint_findings
from k3jax.plan.local import Candidate, Local, ModelFacts, local_numbers
from k3jax.plan.memory import Memory, peak_memory
from k3jax.plan.timing import StepTime, forward_flops, step_time
from k3jax.plan.traffic import Transfer, count_traffic
from k3jax.plan.workload import BYTES, Workload
from meshes.pipeline_ends import divisors

# Transient spikes and what a formula misses: a mesh must fit with so much to spare.
MEMORY_MARGIN = 0.05
# More are typing errors, and a search over them does not end.
MOST_DEVICES, MOST_ROWS = 1 << 20, 1 << 31
# Numbers of micro-batches that a pipeline tries, from the smallest that fills it.
PIPELINE_TRIES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costed:
    """One candidate with everything that is known about it."""

    candidate: Candidate
    memory: Memory
    transfers: tuple[Transfer, ...]
    time: StepTime
    transport: str | None  # of routed rows
    node_size: int | None  # neighbours on the expert axis inside a node, for `hierarchical`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A family of meshes that does not work."""

    axis: str
    count: int  # meshes that it covers, 0 for sizes that were never combined
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The ranked meshes, fastest first."""

    work: Workload
    chips: meshes.Hardware
    ranked: tuple[Costed, ...]
    refusals: tuple[Refusal, ...]
    considered: int


def make_plan(
    work: Workload,
    chips: meshes.Hardware,
    *,
    fixed: Mapping[str, int] | None = None,
    micro_batches: int | None = None,
    best: int = 5,
) -> Plan:
    """Rank the meshes of `chips` for one step of `work`.

    Args:
        work: what is computed.
        chips: where.
        fixed: axis -> size that is not to be searched.
        micro_batches: likewise; None: as many as memory and the pipeline want.
        best: how many to keep.

    Raises:
        UserError: sizes that cannot work, all named, with what would.
    """
    fixed = dict(fixed or {})
    _check_fixed(work, chips, fixed)
    coster = Coster(work, chips)
    refusals: dict[str, Refusal] = {}
    found: list[Costed] = []
    too_large: list[tuple[meshes.MeshShape, Memory]] = []
    misfits: collections.Counter[str] = collections.Counter()
    examples: dict[str, str] = {}
    considered = 0
    beyond = 0
    for shape in _shapes(work, chips, fixed, refusals):
        considered += 1
        if coster.least_bytes(shape) > chips.chip.memory_bytes:
            beyond += 1
            continue
        fitting, reason = _best_of(coster, shape, micro_batches)
        if fitting is not None:
            found.append(fitting)
        elif isinstance(reason, Memory):
            too_large.append((shape, reason))
        elif reason is not None:
            misfits[reason.axis] += 1
            examples.setdefault(reason.axis, f"{name_shape(shape)}: {reason.text}")
    for axis, count in misfits.items():
        refusals[axis] = Refusal(axis=axis, count=count, text=f"for example {examples[axis]}")
    if beyond:
        refusals["replicas"] = Refusal(
            axis="memory",
            count=beyond,
            text=f"the state of {coster.state_bytes / 1e12:.1f} TB, divided by all axes but data, "
            f"exceeds the {chips.chip.memory_bytes / 1e9:.1f} GB of a device; it needs more than "
            f"{coster.state_bytes / chips.chip.memory_bytes:.0f} devices",
        )
    if too_large:
        refusals["memory"] = _memory_refusal(too_large)
    found.sort(key=lambda c: (c.time.total, c.memory.total))
    if not found:
        raise UserError(_nothing_fits(work, chips, fixed, refusals))
    return Plan(
        work=work,
        chips=chips,
        ranked=tuple(found[:best]),
        refusals=tuple(refusals.values()),
        considered=considered,
    )


class Coster:
    """Costs candidates of one workload on one machine; what they share is looked up once."""

    def __init__(self, work: Workload, chips: meshes.Hardware):
        self.work, self.chips = work, chips
        self.facts = ModelFacts(work.cfg)
        self._last_links = None
        self.forward = forward_flops(work)
        one = argument_bytes(
            work.cfg, meshes.MeshShape(), work.precision, training=work.use == "training"
        )
        self.state_bytes = one.total + one.gradients * BYTES[work.precision.parameters] / 4

    def _links(self, shape: meshes.MeshShape):
        if self._last_links is None or self._last_links[0] is not shape:
            self._last_links = shape, meshes.axis_links(shape, self.chips)
        return self._last_links[1]

    def least_bytes(self, shape: meshes.MeshShape) -> float:
        """Bytes of a device that no mesh with so many replicas can go below."""
        return self.state_bytes * shape.data / shape.num_devices

    def local(self, candidate: Candidate) -> Local:
        """Numbers of one device."""
        return local_numbers(self.work, candidate, self.facts)

    def memory(self, local: Local) -> Memory:
        """Its peak."""
        return peak_memory(local, self.chips.chip)

    def cost(self, candidate: Candidate) -> Costed:
        """Everything about one mesh, whether it fits or not.

        Raises:
            ValueError: parameters that do not divide.
        """
        local = self.local(candidate)
        memory = self.memory(local)
        transfers = count_traffic(local, self._links(candidate.shape))
        transport, node_size = _transport(local, self.chips)
        return Costed(
            candidate=candidate,
            memory=memory,
            transfers=transfers,
            time=step_time(local, memory, transfers, self.chips.chip, self.forward),
            transport=transport,
            node_size=node_size,
        )


def has_room(memory: Memory) -> bool:
    """Whether a mesh fits, with `MEMORY_MARGIN` to spare."""
    return memory.total * (1 + MEMORY_MARGIN) <= memory.capacity


def name_shape(shape: meshes.MeshShape) -> str:
    """Axes above 1, in words."""
    sizes = [f"{axis} {size}" for axis, size in zip(meshes.AXES, shape.sizes) if size > 1]
    return " x ".join(sizes) or "one device"


def _transport(local: Local, chips: meshes.Hardware) -> tuple[str | None, int | None]:
    if local.shape.expert == 1 or not local.candidate.rows_on_expert:
        return None, None
    if chips.chip.name == "cpu":
        return "padded", None
    node = meshes.expert_node_size(local.shape, chips)
    if 1 < node < local.shape.expert:
        return "hierarchical", node
    return "ragged", None


def _check_fixed(work: Workload, chips: meshes.Hardware, fixed: Mapping[str, int]) -> None:
    total = chips.num_devices
    if total > MOST_DEVICES:
        raise UserError(f"{chips} has {total:,} devices; at most {MOST_DEVICES:,} can be planned")
    if work.batch > MOST_ROWS:
        raise UserError(f"batch={work.batch:,} must be at most {MOST_ROWS:,}")
    problems = []
    for axis, size in fixed.items():
        if axis not in meshes.AXES:
            raise UserError(f"mesh axis {axis!r} is unknown; axes: {', '.join(meshes.AXES)}")
        if size < 1:
            problems.append(f"{axis} {size} must be at least 1")
            continue
        if total % size:
            problems.append(f"{axis} {size} does not divide the {total} devices of {chips}")
        problems += [
            finding.text
            for finding in axis_findings(work, chips, axis, size)
            if finding.verdict == "refused"
        ]
    product = math.prod(fixed.values())
    if not problems and total % product:
        sizes = " x ".join(f"{axis} {size}" for axis, size in fixed.items())
        problems.append(f"{sizes} = {product} does not divide the {total} devices of {chips}")
    if not problems and set(fixed) == set(meshes.AXES) and product != total:
        problems.append(f"the mesh has {product} devices, but {chips} has {total}")
    if problems:
        raise UserError("this mesh cannot work:\n  - " + "\n  - ".join(problems))


def _shapes(
    work: Workload,
    chips: meshes.Hardware,
    fixed: Mapping[str, int],
    refusals: dict[str, Refusal],
) -> Iterator[meshes.MeshShape]:
    """Meshes whose axes each have a size that works; sizes that do not are written down."""
    total = chips.num_devices
    left_over = total // math.prod(fixed.values())
    allowed: dict[str, list[int]] = {}
    for axis in meshes.AXES:
        if axis in fixed:
            allowed[axis] = [fixed[axis]]
            continue
        allowed[axis] = []
        refused = []
        for size in divisors(left_over):
            bad = [f for f in axis_findings(work, chips, axis, size) if f.verdict == "refused"]
            if bad:
                refused.append((size, bad[0].text))
            else:
                allowed[axis].append(size)
        if refused:
            sizes = ", ".join(str(size) for size, _ in refused[:12])
            sizes += f", ... ({len(refused)} sizes)" if len(refused) > 12 else ""
            refusals[f"{axis} sizes"] = Refusal(
                axis=axis, count=0, text=f"sizes {sizes}: for example {refused[0][1]}"
            )

    def extend(axes, left, sizes):
        if not axes:
            if left == 1:
                yield meshes.MeshShape(**sizes)
            return
        axis, *rest = axes
        for size in allowed[axis]:
            if left % size == 0:
                yield from extend(rest, left // size, sizes | {axis: size})

    yield from extend(list(meshes.AXES), total, {})


def _best_of(
    coster: Coster, shape: meshes.MeshShape, micro: int | None
) -> tuple[Costed | None, Memory | Finding | None]:
    """The fastest way to use a mesh that fits; else what speaks against it."""
    work = coster.work
    candidates = list(_candidates(work, shape, micro))
    if work.use == "training":  # what speaks against the first speaks against all
        findings = joint_findings(work, coster.chips, candidates[0])
        bad = [finding for finding in findings if finding.verdict == "refused"]
        if bad:
            return None, bad[0]
    if work.use == "training" and shape.stage == 1:
        return _fewest_micro_batches(coster, candidates)
    best = smallest = refused = None
    for candidate in candidates:
        if best is not None and candidate.micro_batches > best.candidate.micro_batches:
            break  # takes longer
        bad = [f for f in joint_findings(work, coster.chips, candidate) if f.verdict == "refused"]
        if bad:
            refused = refused or bad[0]
            continue
        memory = coster.memory(coster.local(candidate))
        if not has_room(memory):
            if smallest is None or memory.total < smallest.total:
                smallest = memory
            continue
        costed = coster.cost(candidate)
        if best is None or costed.time.total < best.time.total:
            best = costed
    if best is not None:
        return best, None
    return None, smallest if smallest is not None else refused


def _fewest_micro_batches(
    coster: Coster, candidates: list[Candidate]
) -> tuple[Costed | None, Memory | None]:
    """The first that fits: without a pipeline more micro-batches take longer.

    From two on, more need less memory; one alone keeps no sums of gradients.
    """
    first = coster.memory(coster.local(candidates[0]))
    if has_room(first):
        return coster.cost(candidates[0]), None
    least = coster.memory(coster.local(candidates[-1]))
    if not has_room(least):
        return None, min(first, least, key=lambda memory: memory.total)
    low, high = 1, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if has_room(coster.memory(coster.local(candidates[middle]))):
            high = middle
        else:
            low = middle + 1
    return coster.cost(candidates[high]), None


def _candidates(work: Workload, shape: meshes.MeshShape, micro: int | None) -> Iterator[Candidate]:
    """Ways to use a mesh, those with fewer micro-batches first."""
    if work.use == "training":
        rows, rest = divmod(work.batch, shape.data * shape.fsdp * shape.expert * shape.stage)
        fitting = divisors(rows) if rows else [1]
        counts = [micro or 1] if micro or rest else fitting
        if shape.stage == 1:
            for count in counts:
                yield Candidate(shape=shape, micro_batches=count)
            return
        for count in counts[:PIPELINE_TRIES]:
            # Where the rows do not divide, one candidate says so.
            for parts in [n for n in fitting if rows % (n * count) == 0][:PIPELINE_TRIES] or [1]:
                yield Candidate(
                    shape=shape, micro_batches=count, pipeline_micro_batches=parts * shape.stage
                )
        return
    for whole in (False, True):
        if whole and shape.fsdp > 1:
            continue  # replicas under another name
        for on_expert in (True, False):
            if on_expert or shape.expert > 1:
                yield Candidate(
                    shape=shape,
                    micro_batches=micro or 1,
                    whole_weights=whole,
                    rows_on_expert=on_expert,
                )


def _memory_refusal(too_large: list[tuple[meshes.MeshShape, Memory]]) -> Refusal:
    shape, memory = min(too_large, key=lambda entry: entry[1].total)
    parts = {
        "arguments": memory.arguments,
        "gradients": memory.gradients,
        "activations": memory.saved + memory.intermediates,
        "gathered weights": memory.gathered_weights + memory.fetched_experts,
    }
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
    room = memory.capacity / (1 + MEMORY_MARGIN)
    return Refusal(
        axis="memory",
        count=len(too_large),
        text=f"more than the {room / 1e9:.1f} GB per device that are safe to use; the least is "
        f"{name_shape(shape)} with {memory.total / 1e9:.1f} GB ({listed})",
    )


def _nothing_fits(work, chips, fixed, refusals: Mapping[str, Refusal]) -> str:
    asked = " with " + " x ".join(f"{a} {n}" for a, n in fixed.items()) if fixed else ""
    reasons = [
        f"{refusal.axis}: {refusal.text} ({refusal.count} meshes)"
        if refusal.count
        else f"{refusal.axis}: {refusal.text}"
        for refusal in refusals.values()
    ]
    return (
        f"no mesh of {chips}{asked} can do {work.use} of batch {work.batch} x {work.length} "
        "tokens:\n  - " + "\n  - ".join(reasons)
    )
