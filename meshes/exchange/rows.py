"""Rows to their experts and back: two linear maps, each the other's transpose.

`spread` copies each token to all its rows, `gather_sum` adds the rows of each token, with or
without weights. Both are a local permutation around the transport's `push` and `pull`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from meshes.exchange import gather, hierarchical, padded, ragged
from meshes.exchange.layout import Layout

# Through nodes only whole tokens travel; the few bytes of one number per route go straight.
_FLAT = {"gather": gather, "padded": padded, "ragged": ragged, "hierarchical": padded}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """How the rows of one call of `dispatch` travel."""

    layout: Layout
    transport: str = dataclasses.field(metadata={"static": True})
    mode: str = dataclasses.field(metadata={"static": True})
    node_size: int | None = dataclasses.field(metadata={"static": True})


def _push(values: jax.Array, take: jax.Array, plan: Plan) -> jax.Array:
    if plan.layout.num_ranks == 1:  # sent order is final order
        return values.at[take].get(mode="fill", fill_value=0)
    return _FLAT[plan.transport].push(values, take, plan.layout)


def _pull(rows: jax.Array, plan: Plan) -> jax.Array:
    return rows if plan.layout.num_ranks == 1 else _FLAT[plan.transport].pull(rows, plan.layout)


def spread(x: jax.Array, plan: Plan) -> jax.Array:
    """Tokens x [N, C] to the rows [M, C] of this rank; rows that nobody sent are zero."""
    layout = plan.layout
    if plan.transport == "hierarchical" and layout.num_ranks > 1:
        return hierarchical.spread(x, layout, plan.node_size)
    # The route N*K, nothing to send, becomes token N: zeros.
    token_of_sent = layout.route_of_sent // layout.sent_of_route.shape[1]
    return _push(x, token_of_sent, plan)


def gather_sum(rows: jax.Array, weights: jax.Array | None, plan: Plan) -> jax.Array:
    """Sum over the routes of each token, in float32: [M, C], [N, K] or None (ones) -> [N, C]."""
    if plan.transport == "hierarchical" and plan.layout.num_ranks > 1:
        return hierarchical.gather_sum(rows, weights, plan.layout, plan.node_size)
    sent = _pull(rows, plan)
    routes = sent.at[plan.layout.sent_of_route].get(mode="fill", fill_value=0)
    routes = routes.astype(jnp.float32)
    if weights is not None:
        routes = routes * weights[..., None]
    return routes.sum(1).astype(rows.dtype)


def spread_scalars(weights: jax.Array, plan: Plan) -> jax.Array:
    """One number per route [N, K] to the rows that they belong to, [M]."""
    return _push(weights.reshape(-1, 1), plan.layout.route_of_sent, plan)[:, 0]


def collect_scalars(values: jax.Array, plan: Plan) -> jax.Array:
    """One number per row [M] back to the routes [N, K]; zero where nothing was sent."""
    sent = _pull(values[:, None], plan)[:, 0]
    return sent.at[plan.layout.sent_of_route].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch_rows(x: jax.Array, plan: Plan) -> jax.Array:
    """`spread`; its gradient is `gather_sum` without weights."""
    return spread(x, plan)


def _dispatch_forward(x, plan):
    return spread(x, plan), plan


def _dispatch_backward(plan, drows):
    with jax.named_scope("dispatch_transpose"):
        return gather_sum(drows, None, plan), None


dispatch_rows.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def collect_rows(out: jax.Array, weights: jax.Array, plan: Plan) -> jax.Array:
    """`gather_sum`; its gradient spreads the tokens' gradient once, for rows and weights."""
    return gather_sum(out, weights, plan)


def _collect_forward(out, weights, plan):
    return gather_sum(out, weights, plan), (out, weights, plan)


def _collect_backward(saved, dy):
    out, weights, plan = saved
    with jax.named_scope("collect_transpose"):
        drows = spread(dy, plan).astype(jnp.float32)
        weight_of_row = spread_scalars(weights, plan)
        dout = (drows * weight_of_row[:, None]).astype(out.dtype)
        dweight_of_row = (drows * out.astype(jnp.float32)).sum(1)
        return dout, collect_scalars(dweight_of_row, plan).astype(weights.dtype), None


collect_rows.defvjp(_collect_forward, _collect_backward)
