"""Which matrix precision a dtype asks for.

A float32 model means float32: accelerators whose default matmul precision is lower are asked for
the full one. bfloat16 operands multiply natively and accumulate in float32 everywhere.
"""

import jax
import jax.numpy as jnp


def matmul_precision(dtype) -> jax.lax.Precision | None:
    """HIGHEST for float32 and float64 operands, the backend's native product otherwise."""
    wide = jnp.dtype(dtype) in (jnp.dtype("float32"), jnp.dtype("float64"))
    return jax.lax.Precision.HIGHEST if wide else None
