"""The uniform units of a model over the stages of a pipeline, and how their parameters lie there.

The longest scanned segment of the stack is cut over the stages (Kimi K3: 22 units of four layers);
the layers before and after it, embedding, head and vision stay outside. On a mesh with stages its
parameters have identities up to a multiple of them, in `StageOrder.order()`, so that a step moves
none of them; checkpoints and everything else keep the plain order.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.model.layout import Segment, blocks_before, plan_segments
from k3jax.model.unit import block_grid, unit_body
from k3jax.nn.cache import CallContext
from k3jax.nn.decoder import Stream
from meshes.pipeline import run_pipeline
from meshes.pipeline_ends import divisors, rows_in_stage
from meshes.schedule import Schedule, StageOrder
from meshes.stage_order import (
    from_stage_order,
    keep_identities,
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


def stage_order(cfg: K3Config, stages: int) -> StageOrder:
    """How a model's units lie on so many stages."""
    segment = plan_segments(cfg.layer_kinds)[pipelined_segment(cfg)]
    return StageOrder(units=segment.repeats, stages=stages)


def in_stage_order(arrays: Any, cfg: K3Config, stages: int) -> Any:
    """The arrays of a model whose units lie in depth order, in the order of `stages`.

    Args:
        arrays: dictionary by parameter names, or any tree whose paths contain them (an optimizer's
            state); arrays of other layers stay as they are. Abstract arrays become such.
        cfg: the model.
        stages: stages to come, those of the mesh in force if there is one; 1 changes nothing.
    """
    return _reorder(arrays, cfg, stages, to_stage_order)


def in_depth_order(arrays: Any, cfg: K3Config, stages: int) -> Any:
    """The inverse of `in_stage_order`: what checkpoints hold, and models on other meshes."""
    return _reorder(arrays, cfg, stages, from_stage_order)


def _reorder(arrays, cfg: K3Config, stages: int, move: Callable) -> Any:
    if stages == 1:
        return arrays
    is_pipelined, order = pipelined_names(cfg), stage_order(cfg, stages)
    move = functools.partial(jax.jit(move, static_argnames="order"), order=order)

    def change(path, leaf):
        if not is_pipelined(jax.tree_util.keystr(path, simple=True, separator=".")):
            return leaf
        return _moved_type(move, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else move(leaf)

    return jax.tree_util.tree_map_with_path(change, arrays)


def _moved_type(move: Callable, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type of `move(leaf)`, on the same mesh."""
    moved = jax.eval_shape(move, leaf)
    if not isinstance(leaf.sharding, jax.NamedSharding):
        return moved
    sharding = jax.NamedSharding(leaf.sharding.mesh, moved.sharding.spec)
    return jax.ShapeDtypeStruct(moved.shape, moved.dtype, sharding=sharding)


def pipelined_names(cfg: K3Config) -> Callable[[str], bool]:
    """Whether a dotted name contains that of an array over the pipelined units."""
    pattern = re.compile(rf"(^|\.)language\.stack\.segments\.{pipelined_segment(cfg)}\.")
    return lambda name: pattern.search(name) is not None


def hold_identities(
    new: Mapping[str, jax.Array], old: Mapping[str, jax.Array], cfg: K3Config
) -> dict[str, jax.Array]:
    """`new` by parameter name, where identities of the pipeline keep their `old` values."""
    if num_stages() == 1:
        return dict(new)
    is_pipelined, order = pipelined_names(cfg), stage_order(cfg, num_stages())
    return {
        name: keep_identities(value, old[name], order) if is_pipelined(name) else value
        for name, value in new.items()
    }


def run_stages(
    cfg: K3Config, segment: Segment, module, stream: Stream, context: CallContext
) -> tuple[Stream, tuple[dict, ...]]:
    """`segment` of the stack in stages; what its scan would give.

    The backward pass recomputes whole units. `module` is in the order of the stages if its arrays
    lie on them, else in depth order, and moves to the stages first.
    """
    parts = count_micro_batches(stream.prefix, context.parallel.pipeline_micro_batches)
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


def check_repeats(module, segment: Segment) -> None:
    """Refuse arrays with identities of a pipeline where none is.

    Raises:
        UserError: more units than the model has.
    """
    found = {leaf.shape[0] for leaf in jax.tree.leaves(module)}
    if found != {segment.repeats}:
        raise UserError(
            f"repeated layers have {sorted(found)} units, the model {segment.repeats}: arrays in "
            "the order of pipeline stages? k3jax.model.pipeline.in_depth_order undoes it"
        )


def count_micro_batches(x: jax.Array, asked: int | None) -> int:
    """Parts of the rows of `x` [B, ...] for the pipeline; by default as many as stages, or fewer.

    Raises:
        UserError: the rows of a device do not divide into as many as were asked for.
    """
    rows = rows_in_stage(x)
    if asked is None:
        return max(parts for parts in divisors(rows) if parts <= num_stages())
    if rows % asked:
        raise UserError(
            f"parallel.pipeline_micro_batches={asked} does not divide the {rows} rows that a "
            f"device of a stage computes; use one of {divisors(rows)} or another batch"
        )
    return asked


def check_stages(cfg: K3Config, context: CallContext, caches, scan: bool) -> None:
    """Refuse what a pipeline does not do, where the mesh in force has stages.

    Raises:
        UserError: caches, a trace, unrolled layers, or no layers that repeat.
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
