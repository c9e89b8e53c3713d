"""The definition of the attention-residual mixture: a softmax over depth, entry by entry."""

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
