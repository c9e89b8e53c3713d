"""Rows of tokens in the order of their experts, on one device: out, and back again."""

import jax
import jax.numpy as jnp

from meshes.exchange import count_routes, sort_routes


def sort_by_expert(ids: jax.Array, num_experts: int) -> dict[str, jax.Array]:
    """Order of the rows (token, route) by expert, stable in the token order.

    Args:
        ids: [N, R] int32; `num_experts` marks a row that no expert receives (sorted last).
        num_experts: E.

    Returns:
        token_of_row [N*R], row_of_route [N, R] and group_sizes [E], all int32.
    """
    order, row_of_route = sort_routes(ids, num_experts)
    return {
        "token_of_row": order // ids.shape[1],
        "row_of_route": row_of_route,
        "group_sizes": count_routes(ids, num_experts),
    }


@jax.custom_vjp
def dispatch(x: jax.Array, plan: dict[str, jax.Array]) -> jax.Array:
    """Copy token rows x [N, C] to expert order [N*R, C].

    Its gradient is a gather, too (each token sums its R rows): a scatter-add would serialise.
    """
    return x.at[plan["token_of_row"]].get(mode="promise_in_bounds")


def _dispatch_forward(x, plan):
    return dispatch(x, plan), plan


def _dispatch_backward(plan, dy):
    dx = dy.at[plan["row_of_route"]].get(mode="promise_in_bounds")
    return dx.astype(jnp.float32).sum(1).astype(dy.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(y: jax.Array, weights: jax.Array, plan: dict[str, jax.Array]) -> jax.Array:
    """sum_r weights[n, r] * y[row of (n, r)] in float32: [N*R, C], [N, R] -> [N, C]."""
    rows = y.at[plan["row_of_route"]].get(mode="promise_in_bounds")
    return jnp.einsum("nrc,nr->nc", rows.astype(jnp.float32), weights).astype(y.dtype)


def _combine_forward(y, weights, plan):
    return combine(y, weights, plan), (y, weights, plan)


def _combine_backward(residuals, dout):
    y, weights, plan = residuals
    dout32 = dout.astype(jnp.float32)
    rows = y.at[plan["row_of_route"]].get(mode="promise_in_bounds")
    dweights = jnp.einsum("nrc,nc->nr", rows.astype(jnp.float32), dout32)
    weight_of_row = (
        jnp.zeros((y.shape[0],), jnp.float32)
        .at[plan["row_of_route"].reshape(-1)]
        .set(weights.reshape(-1), unique_indices=True)
    )
    dy = dout32.at[plan["token_of_row"]].get(mode="promise_in_bounds") * weight_of_row[:, None]
    return dy.astype(y.dtype), dweights, None


combine.defvjp(_combine_forward, _combine_backward)
