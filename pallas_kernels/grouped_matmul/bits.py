"""bfloat16 arrays that loops slice and update, held as their bits.

XLA on CPU knows no bfloat16 slices and updates: it converts the whole array to float32 and, after
an update, back, in every turn of a loop. Of integers only the slice is touched.
"""

import jax
import jax.numpy as jnp


def to_bits(array: jax.Array) -> jax.Array:
    """uint16 bits of a bfloat16 array; other arrays as they are."""
    if array.dtype != jnp.bfloat16:
        return array
    return jax.lax.bitcast_convert_type(array, jnp.uint16)


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The array of `dtype` that `to_bits` was given."""
    return jax.lax.bitcast_convert_type(bits, dtype) if dtype == jnp.bfloat16 else bits
