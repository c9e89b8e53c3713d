"""Redundant experts: weights from home to the rank that computes with them, gradients back."""

from typing import Any

import jax
import jax.numpy as jnp

from meshes.axes import EXPERT
from meshes.exchange.rows import Plan
from meshes.exchange.transport import check_buffer


def fetch(weight: jax.Array, plan: Plan) -> jax.Array:
    """Own experts [E/R, ...] to own and fetched ones [2E/R, ...]; slots not needed are zero."""
    return jnp.concatenate([weight, _fetch_all(weight, plan)])


def give_back(gradient: jax.Array, plan: Plan) -> jax.Array:
    """Gradients of own and fetched experts [2E/R, ...] to their sum at home [E/R, ...]."""
    own = gradient.shape[0] // 2
    return gradient[:own] + _give_back_all(gradient[own:], plan)


def _fetch_all(weight: jax.Array, plan: Plan) -> jax.Array:
    layout, rank = plan.layout, jax.lax.axis_index(EXPERT)
    own = weight.shape[0]
    check_buffer("transport='gather' of experts", layout.num_ranks * weight.nbytes)
    everything = jax.lax.all_gather(weight, EXPERT, tiled=True)  # [E, ...]
    slot = jnp.arange(own)
    index = layout.source[rank] * own + layout.first_fetched[rank] + slot
    index = jnp.where(slot < layout.num_fetched[rank], index, everything.shape[0])
    return everything.at[index].get(mode="fill", fill_value=0)


def _give_back_all(gradient: jax.Array, plan: Plan) -> jax.Array:
    layout, rank = plan.layout, jax.lax.axis_index(EXPERT)
    own = gradient.shape[0]
    everything = jnp.zeros((layout.num_ranks * own, *gradient.shape[1:]), jnp.float32)
    slot = jnp.arange(own)
    index = layout.source[rank] * own + layout.first_fetched[rank] + slot
    index = jnp.where(slot < layout.num_fetched[rank], index, everything.shape[0])
    everything = everything.at[index].add(gradient.astype(jnp.float32), mode="drop")
    home = jax.lax.psum_scatter(everything, EXPERT, scatter_dimension=0, tiled=True)
    return home.astype(gradient.dtype)


@jax.custom_vjp
def _fetch_trained(weight: jax.Array, plan: Plan) -> jax.Array:
    return fetch(weight, plan)


def _forward(weight, plan):
    return fetch(weight, plan), plan


def _backward(plan, gradient):
    with jax.named_scope("with_fetched_transpose"):
        return give_back(gradient, plan), None


_fetch_trained.defvjp(_forward, _backward)


def with_fetched_experts(weights: Any, plan: Plan) -> Any:
    """`fetch` for every array of a tree; integers (packed codes) have no gradient."""
    if plan.mode == "plain" or plan.layout.num_ranks == 1:
        return weights

    def one(weight):
        trained = jnp.issubdtype(weight.dtype, jnp.inexact)
        return _fetch_trained(weight, plan) if trained else fetch(weight, plan)

    return jax.tree.map(one, weights)
