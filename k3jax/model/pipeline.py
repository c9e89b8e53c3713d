"""The uniform units of a model over the stages of a pipeline, and how their parameters lie there.

The longest scanned segment of the stack is cut over the stages (Kimi K3: 22 units of four layers);
the layers before and after it, embedding, head and vision stay outside. On a mesh with stages its
parameters have identities up to a multiple of them, in `Schedule.order()`, so that a step moves
none of them; checkpoints and everything else keep the plain order.
"""

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.model.layout import Segment, blocks_before, plan_segments
from k3jax.model.unit import block_grid, unit_body
from k3jax.nn.cache import CallContext
from k3jax.nn.decoder import Stream
from meshes.pipeline import run_pipeline
from meshes.pipeline_ends import divisors
from meshes.schedule import Schedule
from meshes.stage_order import (
    from_stage_order,
    lies_on_stages,
    num_stages,
    on_stages,
    to_stage_order,
)


def pipelined_segment(cfg: K3Config) -> int:
    """Index of the segment whose units run in stages.

    Raises:
        UserError: no layers repeat.
    """
    segments = plan_segments(cfg.layer_kinds)
    index = max(range(len(segments)), key=lambda i: (segments[i].repeats > 1, segments[i].repeats))
    if segments[index].repeats == 1:
        raise UserError(
            f"a model of {cfg.num_layers} layers without a repeated unit cannot run in pipeline "
            "stages; use mesh.stage=1"
        )
    return index


def stage_schedule(cfg: K3Config, stages: int, micro_batches: int) -> Schedule:
    """The schedule of a model's units, with the blocks of attention residuals that travel."""
    segment = plan_segments(cfg.layer_kinds)[pipelined_segment(cfg)]
    units = range(segment.repeats + 1)
    return Schedule(
        units=segment.repeats,
        stages=stages,
        micro_batches=micro_batches,
        entries=tuple(blocks_before(cfg, segment.start + u * len(segment.unit)) for u in units),
    )


def run_stages(
    cfg: K3Config, segment: Segment, module, stream: Stream, context: CallContext
) -> tuple[Stream, tuple[dict, ...]]:
    """`segment` of the stack in stages; what its scan would give.

    The backward pass recomputes whole units. `module` is in the order of the stages if its arrays
    lie on them, else in depth order, and moves to the stages first.
    """
    parts = context.parallel.pipeline_micro_batches or num_stages()
    schedule = stage_schedule(cfg, num_stages(), parts)
    is_staged = {lies_on_stages(leaf) for leaf in jax.tree.leaves(module)}
    if is_staged == {False}:
        module = jax.tree.map(lambda x: to_stage_order(x, schedule), module)
    elif is_staged != {True}:
        raise UserError("some parameters of the pipelined layers lie on the stages, others do not")
    starts, counts = (table[schedule.order()] for table in block_grid(cfg, segment))
    starts &= schedule.is_real()[:, None]  # identities write no block
    body = unit_body(starts, counts, "none")

    def unit(x, prefix, bank, context):
        layers, starts, counts = x
        prefix, bank, (_, collected) = body(prefix, bank, (layers, None, starts, counts), context)
        return prefix, bank, collected

    tables = [on_stages(jnp.asarray(table)) for table in (starts, counts)]
    prefix, bank, collected = run_pipeline(
        unit, schedule, (module, *tables), stream.prefix, stream.bank, context
    )
    collected = jax.tree.map(lambda x: from_stage_order(x, schedule), collected)
    return Stream(prefix, bank, stream.count), collected


def check_stages(cfg: K3Config, context: CallContext, caches, scan: bool, rows: int) -> None:
    """Refuse what a pipeline does not do, where the mesh in force has stages.

    Raises:
        UserError: caches, a trace, unrolled layers, or rows that are no whole micro-batches.
    """
    stages = num_stages()
    pipelined_segment(cfg)
    for is_asked, what in (
        (caches is not None, "caches"),
        (context.trace, "a trace"),
        (not scan, "scan=False"),
    ):
        if is_asked:
            raise UserError(
                f"{what} on a mesh with {stages} pipeline stages does not work; use a mesh with "
                "stage=1"
            )
    parts = context.parallel.pipeline_micro_batches or stages
    if rows % parts:
        raise UserError(
            f"{rows} rows do not divide into parallel.pipeline_micro_batches={parts}; use one of "
            f"{divisors(rows)}"
        )
