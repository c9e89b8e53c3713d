"""Sizes, tiles and ranges of one `mla_attention` call on TPU: all that its three kernels share.

Heads are neighbours in the lanes of [B, T, H*K]. A group of heads is read whose lanes together fill
whole vectors of 128 (two heads of 192, one of 128), straight from there: no copy is padded or
transposed. Within a group each head is the window of whole vectors that covers it, with the lanes
of its neighbours set to zero on one side of a product. Where no group of up to four heads fits,
each head is padded to whole vectors in a copy.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mla.options import AttentionOptions, tile_ranges
from pallas_kernels.tiles import choose_tiles

LANES = 128
# exp2 is what the hardware has; scores are kept times log2(e).
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class AttentionTiles:
    """Tokens of a tile of scores, and of the stretch of the other side held in fast memory.

    Attributes:
        queries: queries of a tile.
        keys: keys of a tile.
        span: bfloat16 tokens held at a time of the side that a kernel runs through; half as many
            of float32.
    """

    queries: int = 512
    keys: int = 512
    span: int = 8192


@dataclasses.dataclass(frozen=True)
class Window:
    """Lanes of one head within those of its group: vectors start..stop, of which low..high its."""

    start: int
    stop: int
    low: int
    high: int

    @property
    def width(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.low == 0 and self.high == self.width


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def heads_per_group(heads: int, *widths: int) -> int:
    """Return how many heads fill whole vectors together, 0 where up to four do not."""
    for group in (1, 2, 4):
        if heads % group == 0 and all(group * width % LANES == 0 for width in widths):
            return group
    return 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """One call without its arrays; hashable.

    Attributes:
        options: scale, mask and outputs.
        batch, num_queries, num_keys, heads: B, T, S, H.
        key_width, value_width: K and V as the kernels see them.
        group: heads of one grid step.
        has_ids: whether there are segments.
        offset: `q_offset` where it is known now, else None.
    """

    options: AttentionOptions
    batch: int
    num_queries: int
    num_keys: int
    heads: int
    key_width: int
    value_width: int
    group: int
    has_ids: bool
    offset: int | None

    @property
    def sees_all_keys_at_last(self) -> bool:
        """Whether it is known now that no key lies past the last query."""
        return not self.options.causal or (
            self.offset is not None and self.offset + self.num_queries >= self.num_keys
        )

    def windows(self, width: int) -> list[Window]:
        """The lanes of each head of the group, `width` being K or V."""
        return [
            Window(
                start := head * width // LANES * LANES,
                round_up((head + 1) * width, LANES),
                head * width - start,
                (head + 1) * width - start,
            )
            for head in range(self.group)
        ]


def widest(windows: list[Window]) -> int:
    """Lanes that hold any of the windows."""
    return max(window.width for window in windows)


def keys_end(plan: Plan, offset, first_query, queries: int):
    """One past the last key that these queries see by order alone; ints or traced."""
    if not plan.options.causal:
        return plan.num_keys
    maximum, minimum = _extremes(offset, first_query)
    last = minimum(first_query + queries, plan.num_queries)
    return maximum(minimum(offset + last, plan.num_keys), 0)


def queries_start(plan: Plan, offset, first_key):
    """The first query that sees the key of this number, or T; ints or traced."""
    if not plan.options.causal:
        return 0
    maximum, minimum = _extremes(offset, first_key)
    return minimum(maximum(first_key - offset, 0), plan.num_queries)


def _extremes(*values):
    known = all(isinstance(value, int) for value in values)
    return (max, min) if known else (jnp.maximum, jnp.minimum)


def divide(value, by: int):
    """Integer quotient of a number that is not negative; an int or traced."""
    return value // by if isinstance(value, int) else lax.div(value, jnp.int32(by))


@dataclasses.dataclass(frozen=True)
class Passage:
    """How one kernel runs: a tile of one side per grid step, through the tiles of the other.

    Attributes:
        plan: the call.
        tiles: sizes asked for.
        over_keys: the kernel holds queries and runs through keys; else the other way round.
    """

    plan: Plan
    tiles: AttentionTiles
    over_keys: bool

    def _side(self, keys: bool) -> tuple[int, int]:
        tokens = self.plan.num_keys if keys else self.plan.num_queries
        tile = self.tiles.keys if keys else self.tiles.queries
        tile = min(tile, round_up(tokens, LANES))
        return tile, -(-tokens // tile)

    @property
    def num_q(self) -> int:
        """Queries of a tile."""
        return self._side(False)[0]

    @property
    def num_k(self) -> int:
        """Keys of a tile."""
        return self._side(True)[0]

    @property
    def held_tile(self) -> int:
        """Tokens of a tile of the side that is held."""
        return self._side(not self.over_keys)[0]

    @property
    def run_tile(self) -> int:
        """Tokens of a tile of the other side."""
        return self._side(self.over_keys)[0]

    @property
    def held_tiles(self) -> int:
        """Tiles of the side that is held, the grid's axis 2."""
        return self._side(not self.over_keys)[1]

    @property
    def run_tiles(self) -> int:
        """Tiles of the other side."""
        return self._side(self.over_keys)[1]

    def tiles_per_span(self, dtype) -> int:
        """Tiles of the other side that lie in fast memory at a time."""
        tokens = self.tiles.span * 2 // jnp.dtype(dtype).itemsize
        spans = -(-self.run_tiles // max(tokens // self.run_tile, 1))
        return -(-self.run_tiles // spans)

    def known_range(self, held):
        """First tile and one past the last that tile `held` meets by order, for a known offset."""
        plan, offset = self.plan, self.plan.offset
        if self.over_keys:
            end = keys_end(plan, offset, held * self.num_q, self.num_q)
            return 0, divide(end + self.num_k - 1, self.num_k)
        start = queries_start(plan, offset, held * self.num_k)
        return divide(start, self.num_q), self.run_tiles

    def ranges(self, ids, offset: jax.Array) -> jax.Array:
        """Return int32 [2, B * held tiles]: first tile of the other side, and one past the last."""
        plan = self.plan
        return tile_ranges(
            plan.options.causal,
            ids,
            offset,
            plan.num_queries,
            plan.num_keys,
            num_q=self.num_q,
            num_k=self.num_k,
            over_keys=self.over_keys,
        )

    def pad_ids(self, ids):
        """Ids of queries and keys as rows [B, 1, tokens], tokens filled to tiles with padding."""

        def pad(x, tile):
            return jnp.pad(x, ((0, 0), (0, -x.shape[1] % tile)))[:, None]

        return None if ids is None else (pad(ids[0], self.num_q), pad(ids[1], self.num_k))


def passage(plan: Plan, kernel: str, over_keys: bool) -> Passage:
    """Return how the named kernel runs on the current device."""
    return Passage(plan, choose_tiles(f"{kernel}_tpu", AttentionTiles()), over_keys)
