"""What the exchange of routed rows did: load of every rank, drops, fetched experts, traffic."""

import dataclasses
import operator

import jax

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
    traffic = meshes.count_traffic(plan.sizes, plan.source, plan.num_fetched, node_size)
    if exchange.plan.transport == "hierarchical":
        rank = jax.lax.axis_index(EXPERT)
        crossings = meshes.count_crossings(plan.rank_of_route, rank, node_size)
        traffic = dataclasses.replace(traffic, slow_rows=jax.lax.psum(crossings, EXPERT))
    fast_bytes, slow_bytes = traffic.link_bytes(row_bytes, expert_bytes)
    return ExchangeLoad(
        home_rows=home_rows,
        rank_rows=rank_rows,
        largest_home_rows=home_rows.max(),
        largest_rank_rows=rank_rows.max(),
        dropped_rows=counts.sum() - rows.sum(),
        fetched_experts=plan.num_fetched.sum(),
        fast_bytes=fast_bytes,
        slow_bytes=slow_bytes,
    )
