"""The definition of the attention-residual mixture, whole and in two phases, entry by entry."""

import jax
import jax.numpy as jnp


def attention_residual(
    bank: jax.Array, current: jax.Array, query: jax.Array, count: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attention_residual`; float64 operands are computed in float64."""
    precise = jnp.promote_types(current.dtype, jnp.float32)
    entries = [jnp.where(n < count, bank[n], 0) for n in range(bank.shape[0])]
    exists = jnp.array([n < count for n in range(bank.shape[0])] + [True])
    values = jnp.stack([*entries, current], axis=2).astype(precise)  # [B, T, N+1, D]
    keys = values / jnp.sqrt(jnp.mean(values**2, axis=-1, keepdims=True) + eps)
    scores = jnp.where(exists, jnp.sum(keys * query.astype(precise), axis=-1), -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.sum(probabilities[..., None] * values, axis=2).astype(current.dtype)
    return mixed, probabilities


def attention_residual_block(
    bank: jax.Array, queries: jax.Array, count: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.attention_residual_block`; float64 operands are computed in float64."""
    precise = jnp.promote_types(bank.dtype, jnp.float32)
    maximum = jnp.full((queries.shape[0], *bank.shape[1:3]), -jnp.inf, precise)
    total = jnp.zeros_like(maximum)
    weighted = jnp.zeros((*maximum.shape, bank.shape[-1]), precise)
    for n in range(bank.shape[0]):  # one more block at a time, as layers make them
        values = jnp.where(n < count, bank[n], 0).astype(precise)  # [B, T, D]
        keys = values / jnp.sqrt(jnp.mean(values**2, axis=-1, keepdims=True) + eps)
        score = jnp.sum(keys * queries.astype(precise)[:, None, None], axis=-1)  # [Q, B, T]
        new_maximum = jax.lax.stop_gradient(jnp.maximum(maximum, score))
        shrink, weight = jnp.exp(maximum - new_maximum), jnp.exp(score - new_maximum)
        maximum = jnp.where(n < count, new_maximum, maximum)
        total = jnp.where(n < count, total * shrink + weight, total)
        added = weighted * shrink[..., None] + weight[..., None] * values
        weighted = jnp.where(n < count, added, weighted)
    return weighted, maximum, total


def attention_residual_merge(
    weighted: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    current: jax.Array,
    query: jax.Array,
    eps: float,
) -> jax.Array:
    """See `pallas_kernels.attention_residual_merge`, of one query's part of the bank."""
    values, query = current.astype(weighted.dtype), query.astype(weighted.dtype)
    keys = values / jnp.sqrt(jnp.mean(values**2, axis=-1, keepdims=True) + eps)
    score = jnp.sum(keys * query, axis=-1)
    maximum = jax.lax.stop_gradient(maximum)
    new_maximum = jax.lax.stop_gradient(jnp.maximum(maximum, score))
    shrink, weight = jnp.exp(maximum - new_maximum), jnp.exp(score - new_maximum)
    mixed = weighted * shrink[..., None] + weight[..., None] * values
    return (mixed / (total * shrink + weight)[..., None]).astype(current.dtype)
