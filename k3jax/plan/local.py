"""What one device holds and computes of a workload on a mesh: the numbers all formulas start from.

Everything is per micro-batch unless the name says otherwise.
"""

import dataclasses
from collections.abc import Sequence

import meshes
from k3jax.config import K3Config, LayerKind
from k3jax.model.layout import Segment, blocks_before, plan_segments
from k3jax.plan.arguments import WHOLE, ArgumentBytes, WeightGroup, sum_bytes, weight_groups
from k3jax.plan.workload import Workload
from meshes.schedule import PipelineCost, pipeline_cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to lay a workload over the devices.

    Attributes:
        shape: the mesh.
        micro_batches: parts the batch is computed in, one after the other.
        pipeline_micro_batches: parts of each that pass through the stages, 1 without stages.
        whole_weights: parameters are whole along the axes that otherwise store them in pieces, so
            that nothing is gathered: for decoding.
        rows_on_expert: the batch is also cut over the expert axis, and rows are exchanged. False:
            every rank sees all rows, computes its experts, and results are summed.
    """

    shape: meshes.MeshShape
    micro_batches: int = 1
    pipeline_micro_batches: int = 1
    whole_weights: bool = False
    rows_on_expert: bool = True

    @property
    def rules(self) -> meshes.AxisRules:
        return WHOLE if self.whole_weights else meshes.AxisRules()

    @property
    def row_parts(self) -> int:
        """Devices that the rows of a micro-batch are cut over, stages apart."""
        rows = self.shape.data * self.shape.fsdp
        return rows * self.shape.expert if self.rows_on_expert else rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
    """Numbers of one device, for one micro-batch.

    Attributes:
        facts: of the model.
        rows: sequences that it sees in a repeating unit: of one part of a pipeline.
        tokens: tokens there whose heads and hidden widths it computes (of its context rank).
        stream: tokens there of its piece of the residual stream, over tensor, too.
        outside_tokens: `tokens` of the layers outside the units, where stages share the rows.
        unit_runs: how often it runs a unit, steps of a pipeline without a micro-batch included.
        weights: where its parameters lie.
        pipeline: costs of the stage axis, None without one.
    """

    work: Workload
    candidate: Candidate
    facts: "ModelFacts"
    rows: int
    tokens: int
    stream: int
    outside_tokens: int
    unit_runs: int
    weights: tuple[WeightGroup, ...]
    pipeline: PipelineCost | None

    @property
    def cfg(self) -> K3Config:
        return self.work.cfg

    @property
    def shape(self) -> meshes.MeshShape:
        return self.candidate.shape

    @property
    def waste(self) -> float:
        """Time of the units relative to that without bubbles and identities."""
        return 1 / (1 - self.pipeline.waste) if self.pipeline else 1.0

    @property
    def expert_width(self) -> int:
        """Width of the rows that travel to experts."""
        return (self.cfg.moe.latent_dim or self.cfg.dim) if self.cfg.moe else 0

    def layer_runs(self, kind: str) -> int:
        """How often it runs a layer of a kind: "kda", "mla", "moe", "dense" or "all"."""
        facts = self.facts
        return self.unit_runs * facts.in_unit[kind] + facts.outside[kind]

    def mean_tokens(self, kind: str) -> float:
        """`tokens` of such a run, on average."""
        facts = self.facts
        inside = self.unit_runs * facts.in_unit[kind] * self.tokens
        return (inside + facts.outside[kind] * self.outside_tokens) / max(1, self.layer_runs(kind))

    def runs_of(self, group: WeightGroup) -> int:
        """How often it uses the arrays of a group, those of one unit at a time."""
        return self.unit_runs if group.part == "unit" and self.pipeline else group.repeats


class ModelFacts:
    """What formulas ask of a model again and again, looked up once."""

    def __init__(self, cfg: K3Config):
        self.cfg = cfg
        self.segment = uniform_segment(cfg)
        self.num_units = self.segment.repeats if self.segment else 0
        self.unit_kinds = self.segment.unit if self.segment else ()
        self.in_unit = _count_kinds(self.unit_kinds)
        every = _count_kinds(cfg.layer_kinds)
        self.outside = {k: every[k] - self.num_units * n for k, n in self.in_unit.items()}
        self.entries = self._bank_entries()
        self._groups: dict[tuple, tuple[WeightGroup, ...]] = {}
        self._stored: dict[tuple, ArgumentBytes] = {}
        self._pipelines: dict[tuple[int, int], PipelineCost] = {}

    def _bank_entries(self) -> tuple[int, ...]:
        """Bank entries before each unit of the uniform segment, and after the last."""
        if self.segment is None:
            return (self.cfg.num_blocks,)
        starts = [self.segment.layer_index(repeat, 0) for repeat in range(self.num_units + 1)]
        return tuple(blocks_before(self.cfg, layer) for layer in starts)

    def weights(self, candidate: "Candidate") -> tuple[WeightGroup, ...]:
        """`weight_groups` of a candidate."""
        key = (candidate.shape.sizes[2:], candidate.whole_weights)
        if key not in self._groups:
            self._groups[key] = weight_groups(self.cfg, candidate.shape, candidate.rules)
        return self._groups[key]

    def stored(self, work: Workload, candidate: "Candidate", tiled: bool) -> ArgumentBytes:
        """Bytes of what a device keeps from step to step; without the batch."""
        stages, key = candidate.shape.stage, (candidate.shape.sizes[2:], candidate.whole_weights)
        key = (*key, stages, work.precision, work.use, tiled)
        if key not in self._stored:
            self._stored[key] = sum_bytes(
                self.weights(candidate),
                stages,
                work.precision,
                0,
                work.use == "training",
                tiled=tiled,
            )
        return self._stored[key]

    def pipeline(self, stages: int, micro_batches: int) -> PipelineCost:
        """Costs of the stage axis."""
        key = (stages, micro_batches)
        if key not in self._pipelines:
            self._pipelines[key] = pipeline_cost(
                self.num_units, stages, micro_batches, entries=self.entries
            )
        return self._pipelines[key]


def _count_kinds(kinds: Sequence[LayerKind]) -> dict[str, int]:
    return {
        "kda": sum(kind.attention == "kda" for kind in kinds),
        "mla": sum(kind.attention == "mla" for kind in kinds),
        "moe": sum(kind.feed_forward == "moe" for kind in kinds),
        "dense": sum(kind.feed_forward == "dense" for kind in kinds),
        "all": len(kinds),
    }


def uniform_segment(cfg: K3Config) -> Segment | None:
    """The longest repeating segment, which a pipeline cuts into stages."""
    repeated = [s for s in plan_segments(cfg.layer_kinds) if s.repeats > 1]
    return max(repeated, key=lambda s: s.num_layers) if repeated else None


def local_numbers(work: Workload, candidate: Candidate, facts: ModelFacts) -> Local:
    """The numbers of `candidate`; sizes that do not divide are rounded up (padding computes, too).

    Raises:
        ValueError: parameters that do not divide by the axes that compute them in pieces.
    """
    shape = candidate.shape
    of_micro_batch = -(-work.batch // (candidate.micro_batches * candidate.row_parts))
    rows = -(-of_micro_batch // candidate.pipeline_micro_batches)
    stream = whole = 1
    if work.use != "decode":
        stream = -(-work.length // (shape.context * shape.tensor))
        whole = stream * shape.tensor
    runs, pipeline = facts.num_units, None
    if shape.stage > 1:
        pipeline = facts.pipeline(shape.stage, candidate.pipeline_micro_batches)
        runs = pipeline.steps
    return Local(
        work=work,
        candidate=candidate,
        facts=facts,
        rows=rows,
        tokens=rows * whole,
        stream=rows * stream,
        outside_tokens=-(-of_micro_batch // shape.stage) * whole,
        unit_runs=runs,
        weights=facts.weights(candidate),
        pipeline=pipeline,
    )
