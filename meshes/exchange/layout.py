"""Where every row is before, on and after its way: integers of one rank, from the exchanged counts.

A route is (token n, choice k). A rank sends its routes ordered by expert ("sent order"); the
receiver gets them ordered by sender ("received order") and works on them ordered by (expert, source
rank, token), its own experts first ("final order").
"""

import dataclasses

import jax
import jax.numpy as jnp

from meshes.axes import EXPERT
from meshes.balance import Pieces, RankPlan, balanced_plan, keep_within, lay_out, plain_plan
from meshes.shard import has_mesh
from meshes.sort import stable_order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """Integers of one rank, all int32.

    Attributes:
        route_of_sent: [N*K], flat route index; N*K after the last row that is sent.
        sent_of_route: [N, K]; N*K for a route that is not sent (padding, dropped).
        begin: [R, R, 2] and `sizes`, see `meshes.balance.Pieces`.
        received_of_final: [M], a permutation; rows that do not exist stay in place.
        final_of_received: [M], its inverse.
        group_sizes: [G], rows of each own expert, then of each fetched one.
        rank_of_sent: [N*K], destination (R: none).
        position_of_sent: [N*K], its final position there.
        source: [R], the rank that each rank fetches experts from.
        first_fetched: [R], which of the source's experts is the first.
        num_fetched: [R].
    """

    route_of_sent: jax.Array
    sent_of_route: jax.Array
    begin: jax.Array
    sizes: jax.Array
    received_of_final: jax.Array
    final_of_received: jax.Array
    group_sizes: jax.Array
    rank_of_sent: jax.Array
    position_of_sent: jax.Array
    source: jax.Array
    first_fetched: jax.Array
    num_fetched: jax.Array

    @property
    def rank_of_route(self) -> jax.Array:
        """Destination of each route [N, K]; -1 for one that is not sent."""
        return self.rank_of_sent.at[self.sent_of_route].get(mode="fill", fill_value=-1)

    @property
    def num_ranks(self) -> int:
        return self.begin.shape[0]

    @property
    def num_sent(self) -> int:
        """N*K, the most rows that a rank can send."""
        return self.route_of_sent.shape[0]

    @property
    def num_rows(self) -> int:
        """M, the rows that a rank has room for."""
        return self.received_of_final.shape[0]


def count_routes(ids: jax.Array, num_experts: int) -> jax.Array:
    """Rows for each expert [E] of the ids [N, K]; the id E is not counted."""
    counts = jnp.zeros((num_experts + 1,), jnp.int32).at[ids.reshape(-1)].add(1)
    return counts[:num_experts]


def exchange_counts(ids: jax.Array, num_experts: int) -> jax.Array:
    """Counts of all ranks [R, E]: what every plan is made from. One small all-gather.

    Call it for every chunk of a batch before the first is dispatched, and pass each result to
    `dispatch`: then no chunk waits for its counts.
    """
    counts = count_routes(ids, num_experts)
    return jax.lax.all_gather(counts, EXPERT) if has_mesh() else counts[None]


def sort_routes(ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Stable order of the flat routes of ids [N, K] by expert [N*K], and its inverse [N, K]."""
    order = stable_order(ids.reshape(-1), num_experts)
    places = jnp.arange(order.size, dtype=jnp.int32)
    inverse = jnp.zeros_like(order).at[order].set(places, unique_indices=True)
    return order, inverse.reshape(ids.shape)


def make_layout(
    ids: jax.Array,  # [N, K]
    counts: jax.Array,  # [R, E]
    rank: jax.Array,  # []
    *,
    mode: str,
    capacity: int,
    node_size: int | None,
) -> tuple[Layout, jax.Array]:
    """The layout of this rank, and how many of its routes are dropped.

    Args:
        ids: experts of this rank's tokens; E for a route that is not sent.
        counts: `exchange_counts` of all ranks.
        rank: this rank.
        mode: "balanced" or "plain".
        capacity: rows that a rank has room for (M).
        node_size: see `balanced_plan`.
    """
    if mode == "balanced":
        kept, plan = counts, balanced_plan(counts, node_size)
    else:
        kept = keep_within(counts, capacity)
        plan = plain_plan(kept)
    pieces = lay_out(kept, plan)
    route_of_sent, sent_of_route = _order_of_sent(ids, counts[rank], kept[rank])
    received_of_final, final_of_received = _permutations(kept, plan, pieces, rank, capacity)
    to_rank, to_position = _destinations(kept, pieces, rank, ids.size)
    own = counts.shape[1] // counts.shape[0]
    layout = Layout(
        route_of_sent=route_of_sent,
        sent_of_route=sent_of_route,
        begin=pieces.begin,
        sizes=pieces.sizes,
        received_of_final=received_of_final,
        final_of_received=final_of_received,
        group_sizes=_group_sizes(pieces, rank, own, parts=2 if mode == "balanced" else 1),
        rank_of_sent=to_rank,
        position_of_sent=to_position,
        source=plan.source,
        first_fetched=jnp.where(pieces.num_fetched > 0, pieces.first_fetched % own, 0),
        num_fetched=pieces.num_fetched,
    )
    return layout, (counts[rank] - kept[rank]).sum()


def route_to_ranks(
    ids: jax.Array, counts: jax.Array, kept: jax.Array, pieces: Pieces, rank: jax.Array
) -> jax.Array:
    """`Layout.rank_of_route` [N, K] alone.

    Args:
        ids: [N, K] of this rank.
        counts: [E] of this rank.
        kept: [R, E], the counts without what is dropped.
        pieces: of the kept counts.
        rank: this rank.
    """
    _, sent_of_route = _order_of_sent(ids, counts, kept[rank])
    to_rank, _ = _destinations(kept, pieces, rank, ids.size)
    return to_rank.at[sent_of_route].get(mode="fill", fill_value=-1)


def _order_of_sent(ids, counts, kept):
    """Routes in expert order without those beyond the kept counts of this rank [E], both ways."""
    order, place = sort_routes(ids, counts.shape[0])
    num_routes = order.size
    skipped = _before(counts) - _before(kept)  # [E], by how much each expert's rows move up
    sent = jnp.arange(num_routes, dtype=jnp.int32)
    place_of_sent = sent + _expand(skipped, kept, num_routes)
    is_sent = sent < kept.sum()
    route_of_sent = order.at[place_of_sent].get(mode="fill", fill_value=num_routes)
    expert = jnp.minimum(ids, counts.shape[0] - 1)
    is_kept = (ids < counts.shape[0]) & (place - _before(counts)[expert] < kept[expert])
    sent_of_route = jnp.where(is_kept, place - skipped[expert], num_routes)
    return jnp.where(is_sent, route_of_sent, num_routes), sent_of_route


def _permutations(kept, plan: RankPlan, pieces: Pieces, rank, capacity):
    """received_of_final, final_of_received [M]: blocks (part, expert, sender) move as a whole."""
    own = kept.shape[1] // kept.shape[0]
    homes = jnp.stack([rank, plan.source[rank]])
    experts = homes[:, None] * own + jnp.arange(own)  # [part, E/R]
    start, count = pieces.block_start[:, experts], kept[:, experts]  # [sender, part, E/R]
    low, high = pieces.low[rank][:, None], pieces.high[rank][:, None]  # [part, 1]
    skipped = jnp.clip(low - start, 0, count)
    size = jnp.maximum(jnp.clip(high - start, 0, count) - skipped, 0)

    sizes = pieces.sizes[:, rank]  # [sender, part]
    received = _before(sizes.reshape(-1)).reshape(sizes.shape) - pieces.begin[:, rank]
    received = received[..., None] + pieces.before[:, experts] + skipped
    part_start = _before(sizes.sum(0))[:, None]
    final = part_start + start + skipped - low

    shift = received - final  # [sender, part, E/R]
    places = jnp.arange(capacity, dtype=jnp.int32)
    exists = places < sizes.sum()
    by_final = _expand(*(a.transpose(1, 2, 0).reshape(-1) for a in (shift, size)), capacity)
    by_received = _expand(-shift.reshape(-1), size.reshape(-1), capacity)
    return (
        jnp.where(exists, places + by_final, places),
        jnp.where(exists, places + by_received, places),
    )


def _destinations(kept, pieces: Pieces, rank, num_routes):
    """Rank and final position of every row in sent order [N*K]; (R, 0) where nothing is sent."""
    num_ranks = kept.shape[0]
    sent = jnp.arange(num_routes, dtype=jnp.int32)
    row = sent + _expand(pieces.block_start[rank] - pieces.before[rank], kept[rank], num_routes)
    part_start = jax.vmap(_before)(pieces.sizes.sum(0))  # [destination, part]
    begin, sizes = pieces.begin[rank].reshape(-1), pieces.sizes[rank].reshape(-1)
    order = jnp.argsort(begin, stable=True)
    to_rank = _expand((order // 2).astype(jnp.int32), sizes[order], num_routes)
    shift = (part_start - pieces.low).reshape(-1)[order]
    position = row + _expand(shift, sizes[order], num_routes)
    is_sent = sent < kept[rank].sum()
    return jnp.where(is_sent, to_rank, num_ranks), jnp.where(is_sent, position, 0)


def _group_sizes(pieces: Pieces, rank, own, parts):
    """Rows of the own experts, then of the fetched ones."""
    sizes = []
    for first, part in ((rank * own, 0), (pieces.first_fetched[rank], 1))[:parts]:
        bounds = first + jnp.arange(own + 1)
        bounds = jnp.minimum(bounds, pieces.expert_start.size - 1)
        rows = jnp.clip(
            pieces.expert_start[bounds], pieces.low[rank, part], pieces.high[rank, part]
        )
        sizes.append(jnp.diff(rows))
    return jnp.concatenate(sizes).astype(jnp.int32)


def _before(x: jax.Array) -> jax.Array:
    """Cumulative sum of the entries before each one."""
    return jnp.cumsum(x, dtype=jnp.int32) - x


def _expand(values: jax.Array, sizes: jax.Array, length: int) -> jax.Array:
    """Each value `sizes` times, cut or continued to `length`."""
    return jnp.repeat(values, sizes, total_repeat_length=length)
