"""The `pallas_call` of the attention kernels on TPU: blocks, grid and cost.

Grid [B, head groups, tiles of the held side, spans of the other]. A span whose tiles no pair needs
is not fetched: its index repeats a neighbour's.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.mosaic_tpu_plan import Passage, divide


@dataclasses.dataclass(frozen=True)
class Spans:
    """How the side that a kernel runs through is cut.

    Attributes:
        run: the kernel.
        tiles: tiles of one span.
    """

    run: Passage
    tiles: int

    @property
    def count(self) -> int:
        return -(-self.run.run_tiles // self.tiles)

    @property
    def tokens(self) -> int:
        """Tokens of one span."""
        return self.tiles * self.run.run_tile

    def index(self, batch, held, span, ranges=None):
        """The span in fast memory at a step: `span`, or a neighbour where that is not needed."""
        run, plan = self.run, self.run.plan
        if self.count == 1:
            return 0
        if plan.offset is not None and not plan.has_ids:
            first, stop = run.known_range(held)
        elif ranges is None:
            first, stop = 0, run.run_tiles
        else:
            place = batch * run.held_tiles + held
            first, stop = ranges[0, place], ranges[1, place]
        known = all(isinstance(value, int) for value in (first, stop, span))
        maximum, minimum = (max, min) if known else (jnp.maximum, jnp.minimum)
        first = divide(first, self.tiles)
        last = divide(maximum(stop - 1, 0), self.tiles)
        return minimum(maximum(span, minimum(first, self.count - 1)), maximum(last, first))

    def fetches(self, repeats: int) -> list[int]:
        """The spans fetched, in order, when all held tiles pass `repeats` times in a row."""
        steps = itertools.product(range(repeats), range(self.run.held_tiles), range(self.count))
        order = [self.index(0, held, span) for _, held, span in steps]
        return [span for span, _ in itertools.groupby(order)]


def attention_call(
    kernel: Callable,
    name: str,
    run: Passage,
    *,
    held: Sequence[tuple[jax.Array, int]],
    passing: Sequence[tuple[jax.Array, int]],
    held_rows: Sequence[jax.Array] = (),
    passing_rows: Sequence[jax.Array] = (),
    ids: tuple[jax.Array, jax.Array] | None,
    offset: jax.Array,
    out: Sequence[tuple[jax.ShapeDtypeStruct, int]],
    out_rows: Sequence[jax.ShapeDtypeStruct] = (),
    scratch: Sequence,
    multiplied: int,
) -> list[jax.Array]:
    """Run `kernel(spans, ranges, offset, *operands, *results, *scratch)` over the grid.

    Args:
        kernel: its operands come in the order of these arguments.
        name: of the call.
        run: which side is held.
        held: (array [B, tokens, H*width], width) of the side with a tile per step.
        passing: the same of the side that is run through.
        held_rows: numbers [B, H, 1, tokens] of the held side.
        passing_rows: the same of the other side.
        ids: None, or ids of queries [B, T] and keys [B, S].
        offset: position of the first query [B].
        out: (shape, width) of results of the held side.
        out_rows: shapes [B, H, 1, tokens] of results.
        scratch: shapes of scratch memory.
        multiplied: multiplications per pair of tokens and head.
    """
    plan, group = run.plan, run.plan.group
    spans = Spans(run, run.tiles_per_span(passing[0][0].dtype))
    tile = run.held_tile

    def wide(width):
        return pl.BlockSpec((1, tile, group * width), lambda b, h, i, s, *_: (b, i, h))

    def span_of(b, i, s, ranges):
        return spans.index(b, i, s, ranges)

    def wide_span(width):
        return pl.BlockSpec(
            (1, spans.tokens, group * width),
            lambda b, h, i, s, ranges, _: (b, span_of(b, i, s, ranges), h),
        )

    rows = pl.BlockSpec((1, group, 1, tile), lambda b, h, i, s, *_: (b, h, 0, i))
    rows_span = pl.BlockSpec(
        (1, group, 1, spans.tokens),
        lambda b, h, i, s, ranges, _: (b, h, 0, span_of(b, i, s, ranges)),
    )
    ids_held = pl.BlockSpec((1, 1, tile), lambda b, h, i, s, *_: (b, 0, i))
    ids_span = pl.BlockSpec(
        (1, 1, spans.tokens), lambda b, h, i, s, ranges, _: (b, 0, span_of(b, i, s, ranges))
    )
    padded_ids = run.pad_ids(ids)
    flat_ids = None if ids is None else tuple(x[:, 0] for x in padded_ids)
    ids_specs = (ids_held, ids_span) if run.over_keys else (ids_span, ids_held)
    in_specs = [
        *(wide(width) for _, width in held),
        *(wide_span(width) for _, width in passing),
        *(rows for _ in held_rows),
        *(rows_span for _ in passing_rows),
        *(() if ids is None else ids_specs),
    ]
    operands = [
        *(x for x, _ in held),
        *(x for x, _ in passing),
        *held_rows,
        *passing_rows,
        *(() if ids is None else padded_ids),
    ]
    out_specs = [*(wide(width) for _, width in out), *(rows for _ in out_rows)]
    out_shape = [*(shape for shape, _ in out), *out_rows]
    moved = [*zip(in_specs, operands, strict=True), *zip(out_specs, out_shape, strict=True)]
    fast_memory = 2 * sum(math.prod(spec.block_shape) * x.dtype.itemsize for spec, x in moved)
    fast_memory += sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in scratch)
    # Scores, weights and their like of each head of the group, and room for the compiler.
    fast_memory += (8 * group * run.num_q * run.num_k * 4) + (4 << 20)
    return pl.pallas_call(
        functools.partial(kernel, spans),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.batch, plan.heads // group, run.held_tiles, spans.count),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=list(scratch),
        ),
        compiler_params=pltpu.CompilerParams(
            # Queries or keys of one group share what is held of the other side.
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=max(fast_memory, 16 << 20),
        ),
        cost_estimate=_cost(run, spans, held, passing, held_rows, passing_rows, padded_ids, out,
                            out_rows, multiplied),
        name=name,
    )(run.ranges(flat_ids, offset), offset, *operands)  # fmt: skip


def _cost(
    run, spans, held, passing, held_rows, passing_rows, ids, out, out_rows, multiplied
) -> pl.CostEstimate:
    # Exact for known offsets; with segments, and offsets known later, as if all spans passed.
    plan = run.plan
    groups = plan.heads // plan.group

    def size(x):
        return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize

    def fetched(x, tokens, fetches):
        return sum(min(spans.tokens, tokens - span * spans.tokens) for span in fetches) * (
            size(x) // tokens
        )

    own = spans.fetches(1)
    moved = sum(size(x) for x in (*(x for x, _ in (*held, *out)), *held_rows, *out_rows))
    moved += sum(fetched(x, x.shape[1], own) for x, _ in passing)
    moved += sum(fetched(x, x.shape[3], own) for x in passing_rows)
    if ids is not None:
        held_ids, passing_ids = ids if run.over_keys else ids[::-1]
        moved += size(held_ids) * (groups if run.held_tiles > 1 else 1)
        moved += fetched(passing_ids, passing_ids.shape[2], spans.fetches(groups))
    if plan.offset is not None and not plan.has_ids:
        ranges = [run.known_range(held_tile) for held_tile in range(run.held_tiles)]
        tiles = sum(max(stop - first, 0) for first, stop in ranges)
    else:
        tiles = run.held_tiles * run.run_tiles
    pairs = plan.batch * plan.heads * tiles * run.num_q * run.num_k
    return pl.CostEstimate(
        flops=2 * pairs * multiplied, transcendentals=pairs, bytes_accessed=moved
    )
