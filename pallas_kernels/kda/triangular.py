"""The inverse of I + A for strictly lower triangular A, by forward substitution."""

import jax
import jax.numpy as jnp


def invert_unit_lower(strictly_lower: jax.Array) -> jax.Array:
    """Return (I + A)^-1.

    Column after column is eliminated from the rows below it, `X <- X - A_j X_j`. Every intermediate
    is an entry of the inverse of a leading block. Powers of A, which grow without bound for similar
    keys and slow decay and then have to cancel, never appear.

    Args:
        strictly_lower: [..., C, C], zero on and above the diagonal. The loop over C is unrolled
            (it becomes one fused pass over a small matrix).
    """
    size = strictly_lower.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=strictly_lower.dtype), strictly_lower.shape)
    for column in range(size - 1):
        row = inverse[..., column : column + 1, :]
        inverse = inverse - strictly_lower[..., :, column : column + 1] * row
    return inverse
