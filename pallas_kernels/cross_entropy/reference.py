"""The definition of the terms of the cross entropy: all logits at once."""

import jax
import jax.numpy as jnp


def logit_terms(x: jax.Array, weight: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.cross_entropy.logit_terms`; float64 operands stay in float64."""
    precise = jnp.promote_types(x.dtype, jnp.float32)
    columns = weight.astype(precise).T  # [W, D]
    logits = jnp.sum(x.astype(precise)[:, None] * columns[None], axis=-1)
    is_target = jnp.arange(weight.shape[1]) == targets[:, None]
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    return logsumexp, jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
