"""The inverse of I + A for strictly lower triangular A, by a ladder of blocks."""

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


def invert_unit_lower(strictly_lower: jax.Array) -> jax.Array:
    """Return (I + A)^-1.

    Block forward substitution, doubling the block: with the two diagonal blocks inverted, the
    block below the diagonal is `-inverse_later A_below inverse_earlier`. Every intermediate is an
    entry of the inverse; powers of A, which grow without bound for similar keys, never appear.

    Args:
        strictly_lower: [..., C, C], zero on and above the diagonal; C a power of two.
    """
    size = strictly_lower.shape[-1]
    lead = strictly_lower.shape[:-2]
    inverse = jnp.ones((*lead, size, 1, 1), strictly_lower.dtype)
    block = 1
    while block < size:
        pairs = size // (2 * block)
        grid = strictly_lower.reshape(*lead, pairs, 2 * block, pairs, 2 * block)
        square = jnp.moveaxis(jnp.diagonal(grid, axis1=-4, axis2=-2), -1, -3)
        halves = inverse.reshape(*lead, pairs, 2, block, block)
        earlier, later = halves[..., 0, :, :], halves[..., 1, :, :]
        below = square[..., block:, :block]
        below = -jnp.matmul(
            later, jnp.matmul(below, earlier, precision=_HIGHEST), precision=_HIGHEST
        )
        top = jnp.concatenate([earlier, jnp.zeros_like(below)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([below, later], axis=-1)], axis=-2)
        block *= 2
    return inverse.reshape(*lead, size, size)
