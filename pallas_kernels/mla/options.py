"""What the forms of `mla_attention` share: the fixed part of a call, and who sees which key."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The arguments of one call that are not arrays.

    Attributes:
        scale: factor of the scores.
        causal: whether a query sees only keys up to its own position.
        output_dtype: of the output.
        return_max: whether the largest score of each head is asked for.
    """

    scale: float
    causal: bool
    output_dtype: jnp.dtype
    return_max: bool


def query_limits(
    q_offset: int | jax.Array, batch: int, num_queries: int, num_keys: int, causal: bool
) -> jax.Array:
    """Return the last key position that each query may see, int32 [B, T]."""
    if not causal:
        return jnp.full((batch, num_queries), num_keys - 1, jnp.int32)
    first = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), (batch,))
    return first[:, None] + jnp.arange(num_queries, dtype=jnp.int32)
