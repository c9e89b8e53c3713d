"""What the exchange of routed rows did: load of every rank, drops, fetched experts, traffic."""

import dataclasses
import operator

import jax
import jax.numpy as jnp

import meshes
from meshes import EXPERT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExchangeLoad:
    """Sums over the exchanges of a step (chunks, groups of ranks, micro-batches); add freely.

    Bytes are those of a forward pass: rows to their experts and back, and fetched experts; the
    backward pass moves as many again, and the rows once more where they are recomputed.

    Attributes:
        home_rows: [..., R] int32, rows for the experts of each rank: its load if nothing balanced.
        rank_rows: [..., R] int32, rows that each rank computed.
        largest_home_rows: [...] int32, `home_rows` of the busiest rank of each exchange.
        largest_rank_rows: [...] int32, `rank_rows` of the busiest rank of each exchange.
        dropped_rows: [...] int32, rows beyond the capacity of plain mode.
        fetched_experts: [...] int32, redundant experts that ranks fetched.
        fast_bytes: [...] float32, sent to other ranks of the same node.
        slow_bytes: [...] float32, sent to other nodes of `Parallel.node_size` ranks.
    """

    home_rows: jax.Array
    rank_rows: jax.Array
    largest_home_rows: jax.Array
    largest_rank_rows: jax.Array
    dropped_rows: jax.Array
    fetched_experts: jax.Array
    fast_bytes: jax.Array
    slow_bytes: jax.Array

    def __add__(self, other: "ExchangeLoad") -> "ExchangeLoad":
        return jax.tree.map(operator.add, self, other)

    def imbalance(self) -> tuple[jax.Array, jax.Array]:
        """Busiest rank over the mean rank, before and after balancing; [...] each.

        Every exchange waits for its busiest rank, so this is how much longer its product takes.
        """
        return (
            self.largest_home_rows / (self.home_rows.mean(-1) + 1e-9),
            self.largest_rank_rows / (self.rank_rows.mean(-1) + 1e-9),
        )


def measure_exchange(
    exchange: meshes.Dispatched, *, row_bytes: int, expert_bytes: int
) -> ExchangeLoad:
    """The load of one exchange, the same on all of its ranks (inside a per-device function)."""
    plan, counts, node_size = exchange.plan.layout, exchange.counts, exchange.plan.node_size
    num_ranks = counts.shape[0]
    rows = plan.sizes.sum(-1)  # [source, destination]
    home_rows = counts.sum(0).reshape(num_ranks, -1).sum(-1)
    rank_rows = rows.sum(0)
    node = jnp.arange(num_ranks) // (node_size or num_ranks)
    leaves = node[:, None] != node
    stays = ~leaves & ~jnp.eye(num_ranks, dtype=jnp.bool_)
    slow_rows, fast_rows = (jnp.where(pairs, rows, 0).sum() for pairs in (leaves, stays))
    if exchange.plan.transport == "hierarchical":
        slow_rows = jax.lax.psum(_nodes_per_token(plan, node), EXPERT)
    slow_experts = jnp.where(node[plan.source] != node, plan.num_fetched, 0).sum()
    fast_experts = plan.num_fetched.sum() - slow_experts

    def sent_bytes(rows, experts):
        return 2.0 * row_bytes * rows.astype(jnp.float32) + float(expert_bytes) * experts

    return ExchangeLoad(
        home_rows=home_rows,
        rank_rows=rank_rows,
        largest_home_rows=home_rows.max(),
        largest_rank_rows=rank_rows.max(),
        dropped_rows=counts.sum() - rows.sum(),
        fetched_experts=plan.num_fetched.sum(),
        fast_bytes=sent_bytes(fast_rows, fast_experts),
        slow_bytes=sent_bytes(slow_rows, slow_experts),
    )


def _nodes_per_token(plan, node: jax.Array) -> jax.Array:
    """Rows that this rank sends to other nodes when a token crosses once for each of them; []."""
    own = node[jax.lax.axis_index(EXPERT)]
    rank = plan.rank_of_sent.at[plan.sent_of_route].get(mode="fill", fill_value=len(node))
    to_node = node.at[rank].get(mode="fill", fill_value=-1)  # [N, K]
    to_node = jnp.sort(jnp.where(to_node < 0, own, to_node), axis=-1)
    is_first = jnp.pad(to_node[:, 1:] != to_node[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return (is_first & (to_node != own)).sum(dtype=jnp.int32)
