"""What an exchange moves: load of the ranks, rows and experts over fast and over slow links."""

import dataclasses

import jax
import jax.numpy as jnp

from meshes.balance import balanced_plan, keep_within, lay_out, plain_plan
from meshes.exchange.layout import route_to_ranks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Traffic:
    """What crosses in one direction, of all ranks together, int32 [].

    Links inside a node are fast, links between nodes slow. What stays on its rank is not counted.
    """

    fast_rows: jax.Array
    slow_rows: jax.Array
    fast_experts: jax.Array
    slow_experts: jax.Array

    def link_bytes(self, row_bytes: float, expert_bytes: float) -> tuple[jax.Array, jax.Array]:
        """Bytes of a forward pass over fast and slow links, float32: rows there and back, experts.

        The backward pass moves as many again (gradients), and the rows once more where recomputed.
        """
        pairs = ((self.fast_rows, self.fast_experts), (self.slow_rows, self.slow_experts))
        return tuple(
            2.0 * row_bytes * jnp.asarray(rows, jnp.float32) + expert_bytes * experts
            for rows, experts in pairs
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExchangeReport:
    """One exchange of all ranks.

    Attributes:
        home_rows: [R], rows for the experts of each rank: its load if nothing was done.
        rank_rows: [R], rows that each rank computes.
        dropped_rows: [], rows beyond the capacity (plain mode).
        fetched_experts: [R], redundant experts of each rank.
        given_experts: [R], copies of its experts that each rank sends to others.
        traffic: see `Traffic`.
    """

    home_rows: jax.Array
    rank_rows: jax.Array
    dropped_rows: jax.Array
    fetched_experts: jax.Array
    given_experts: jax.Array
    traffic: Traffic


def count_traffic(
    sizes: jax.Array,  # [R, R, parts]
    source: jax.Array,  # [R]
    num_fetched: jax.Array,  # [R]
    node_size: int | None,
) -> Traffic:
    """Traffic when every row travels by itself, from the fields of `Pieces` and `RankPlan`.

    Args:
        sizes: rows from each source to each destination.
        source: the rank that each rank fetches experts from.
        num_fetched: how many.
        node_size: ranks in a node; None: all are in one.
    """
    num_ranks = len(source)
    ranks = jnp.arange(num_ranks)
    node = ranks // (node_size or num_ranks)
    rows = jnp.asarray(sizes).sum(-1)
    leaves = node[:, None] != node
    stays = ~leaves & (ranks[:, None] != ranks)
    slow_experts = jnp.where(node[source] != node, num_fetched, 0).sum()
    return Traffic(
        fast_rows=jnp.where(stays, rows, 0).sum(),
        slow_rows=jnp.where(leaves, rows, 0).sum(),
        fast_experts=num_fetched.sum() - slow_experts,
        slow_experts=slow_experts,
    )


def count_crossings(to_rank: jax.Array, rank: jax.Array, node_size: int) -> jax.Array:
    """Rows that tokens of one rank send to other nodes when each crosses once per node; [].

    Args:
        to_rank: [N, K], rank of each route; -1 for a route that is not sent.
        rank: theirs.
        node_size: ranks in a node.
    """
    # A route that is not sent counts like one that stays.
    to_node = jnp.sort(jnp.where(to_rank < 0, rank, to_rank) // node_size, axis=-1)
    is_first = jnp.pad(to_node[:, 1:] != to_node[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return (is_first & (to_node != rank // node_size)).sum(dtype=jnp.int32)


def exchange_report(
    counts: jax.Array,  # [R, E]
    *,
    mode: str = "balanced",
    node_size: int | None = None,
    capacity: int | None = None,
    ids: jax.Array | None = None,  # [R, N, K]
) -> ExchangeReport:
    """Load and traffic of any routing, from the counts alone; nothing is moved.

    Args:
        counts: rows of every rank for every expert.
        mode: "balanced" or "plain".
        node_size: ranks in a node; the balanced plan then prefers experts of the same node.
        capacity: plain mode: rows that a rank takes; None: all.
        ids: experts of all tokens, E for padding. With them the rows of the transport
            "hierarchical" are counted: a token crosses once to each node. Needs `node_size`.
    """
    if ids is not None and node_size is None:
        raise ValueError(
            "exchange_report: ids= is for counting tokens that cross between nodes; give node_size="
        )
    counts = jnp.asarray(counts, jnp.int32)
    num_ranks = counts.shape[0]
    kept = counts
    if mode == "plain":
        kept = counts if capacity is None else keep_within(counts, capacity)
    plan = balanced_plan(counts, node_size) if mode == "balanced" else plain_plan(counts)
    pieces = lay_out(kept, plan)
    traffic = count_traffic(pieces.sizes, plan.source, pieces.num_fetched, node_size)
    if ids is not None:
        ranks = jnp.arange(num_ranks)
        to_rank = jax.vmap(lambda i, r: route_to_ranks(i, counts[r], kept, pieces, r))(ids, ranks)
        crossings = jax.vmap(lambda t, r: count_crossings(t, r, node_size))(to_rank, ranks)
        traffic = dataclasses.replace(traffic, slow_rows=crossings.sum())
    given = jnp.zeros((num_ranks,), jnp.int32).at[plan.source].add(pieces.num_fetched)
    return ExchangeReport(
        home_rows=counts.sum(0).reshape(num_ranks, -1).sum(1),
        rank_rows=pieces.sizes.sum((0, 2)),
        dropped_rows=counts.sum() - kept.sum(),
        fetched_experts=pieces.num_fetched,
        given_experts=given,
        traffic=traffic,
    )
