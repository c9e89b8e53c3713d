"""Expert parallelism inside `meshes.per_device`: rows to the ranks that compute them, and back.

    d = dispatch(x, ids, num_experts=896)            # rows in groups by expert
    gate, up, down = with_fetched((gate, up, down), d)  # own experts, then fetched ones
    y = collect(expert_product(d.rows, gate, up, down, d.group_sizes), weights, d)

Mode "balanced": every rank computes the same number of rows whatever the router does, with at most
E/R redundant experts, whose gradients return to their home. Mode "plain": rows go to the home of
their expert, up to a capacity; the rest is dropped and counted.

Transports: "ragged" (native, TPU and GPU), "padded" (rounds of fixed capacity, exact for any skew),
"gather" (everything to everyone; tests), "hierarchical" (each token crosses to another node once).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from meshes.axes import EXPERT
from meshes.exchange.experts import with_fetched_experts
from meshes.exchange.layout import count_routes, exchange_counts, make_layout, sort_routes
from meshes.exchange.report import (
    ExchangeReport,
    Traffic,
    count_crossings,
    count_traffic,
    exchange_report,
)
from meshes.exchange.rows import Plan, collect_rows, dispatch_rows
from meshes.exchange.transport import check_transport, choose_transport
from meshes.shard import has_mesh

__all__ = [
    "Dispatched",
    "ExchangeReport",
    "Traffic",
    "choose_transport",
    "collect",
    "count_crossings",
    "count_routes",
    "count_traffic",
    "dispatch",
    "exchange_counts",
    "exchange_report",
    "sort_routes",
    "with_fetched",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """What one rank received.

    Attributes:
        rows: [M, C], in consecutive groups; zero after the last row. M is N*K (tokens times routes)
            in balanced mode and with one rank, `capacity_factor` times that in plain mode.
        group_sizes: [G] int32. G = E/R own experts, and in balanced mode on more than one rank E/R
            slots for fetched experts after them.
        plan: integers for `with_fetched` and `collect`.
        dropped: [] int32, routes of this rank's own tokens that found no room (plain mode).
        counts: [R, E] int32, routes of every rank for every expert, before any were dropped.
    """

    rows: jax.Array
    group_sizes: jax.Array
    plan: Plan
    dropped: jax.Array
    counts: jax.Array


def dispatch(
    x: jax.Array,  # [N, C]
    ids: jax.Array,  # [N, K] int32
    *,
    num_experts: int,
    mode: str = "balanced",
    transport: str | None = None,
    node_size: int | None = None,
    capacity_factor: float = 2.0,
    counts: jax.Array | None = None,
) -> Dispatched:
    """Send each token to the experts that it chose; call it inside `per_device`.

    Args:
        x: this rank's tokens; every rank of the expert axis has as many.
        ids: their experts, 0 ... E - 1. E marks a route that is not dispatched: padding.
        num_experts: E, a multiple of the size of the expert axis.
        mode: "balanced" or "plain".
        transport: one of `TRANSPORTS`, or None: `choose_transport()`.
        node_size: ranks of the expert axis inside one node. The transport "hierarchical" needs it;
            the balanced plan then prefers experts of the same node.
        capacity_factor: plain mode: room of a rank, in mean rows per rank (N*K).
        counts: `exchange_counts(ids, num_experts)`, where that was started earlier.

    Raises:
        ValueError: unknown or impossible options, before anything runs.
    """
    num_ranks = jax.lax.axis_size(EXPERT) if has_mesh() else 1
    transport = check_transport(
        transport, mode=mode, num_ranks=num_ranks, num_experts=num_experts, node_size=node_size
    )
    num_routes = ids.size
    if num_ranks * num_routes >= 2**31:
        raise ValueError(
            f"dispatch: {num_ranks} ranks of {num_routes} routes are more than 2**31 rows; use "
            "more chunks (expert_chunks=) or fewer tokens in one call"
        )
    if not capacity_factor > 0:
        raise ValueError(f"capacity_factor={capacity_factor} must be positive")
    capacity = num_routes
    if mode == "plain" and num_ranks > 1:
        capacity = min(math.ceil(capacity_factor * num_routes), num_ranks * num_routes)
    with jax.named_scope("dispatch"):
        rank = jnp.int32(0)
        if num_ranks > 1:
            rank = jax.lax.axis_index(EXPERT)
            counts = exchange_counts(ids, num_experts) if counts is None else counts
        else:
            counts = count_routes(ids, num_experts)[None]
        layout, dropped = make_layout(
            ids, counts, rank, mode=mode, capacity=capacity, node_size=node_size
        )
        plan = Plan(layout, transport, mode, node_size)
        sizes = layout.group_sizes if num_ranks > 1 else layout.group_sizes[:num_experts]
        return Dispatched(dispatch_rows(x, plan), sizes, plan, dropped, counts)


def with_fetched(weights: Any, dispatched: Dispatched) -> Any:
    """Own experts [E/R, ...] followed by the fetched ones: [2E/R, ...], one matrix per group.

    In plain mode and with one rank the weights themselves. The gradient of a fetched expert returns
    to its home rank and is added there in float32.

    Args:
        weights: an array or a tree of arrays (packed experts, too), complete except for the expert
            axis: ranks that differ along another axis have different plans, so what is stored in
            pieces along other axes is gathered first.
        dispatched: the result of `dispatch`.
    """
    with jax.named_scope("with_fetched"):
        return with_fetched_experts(weights, dispatched.plan)


def collect(out: jax.Array, weights: jax.Array, dispatched: Dispatched) -> jax.Array:
    """sum_k weights[n, k] * out[row of (n, k)] in float32, in out's type: [M, C], [N, K] -> [N, C].

    Routes that were not dispatched or were dropped add nothing.
    """
    with jax.named_scope("collect"):
        return collect_rows(out, weights, dispatched.plan)
