"""What the forms of `mla_attention` share: the fixed part of a call, and who sees which keys."""

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


def as_wide_as(q_latent: jax.Array, pages: jax.Array) -> jax.Array:
    """Fill the channels of decoding queries with zeros to those of the pages."""
    extra = pages.shape[2] - q_latent.shape[3]
    return jnp.pad(q_latent, ((0, 0), (0, 0), (0, 0), (0, extra)))


def query_limits(
    q_offset: int | jax.Array, batch: int, num_queries: int, num_keys: int, causal: bool
) -> jax.Array:
    """Return the last key position that each query may see, int32 [B, T]."""
    if not causal:
        return jnp.full((batch, num_queries), num_keys - 1, jnp.int32)
    first = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), (batch,))
    return first[:, None] + jnp.arange(num_queries, dtype=jnp.int32)


def tile_ranges(
    causal: bool,
    ids: tuple[jax.Array, jax.Array] | None,
    offset: jax.Array,
    num_queries: int,
    num_keys: int,
    *,
    num_q: int,
    num_k: int,
    over_keys: bool,
) -> jax.Array:
    """Return which tiles of one side each tile of the other meets.

    Args:
        causal: whether queries see only keys up to their own position.
        ids: None, or ids of queries [B, T] and keys [B, S], filled to whole tiles with zeros.
        offset: position of the first query [B].
        num_queries: T.
        num_keys: S.
        num_q: queries of a tile.
        num_k: keys of a tile.
        over_keys: the ranges are of tiles of keys, for each tile of queries; else the reverse.

    Returns:
        int32 [2, B * tiles]: first tile, and one past the last; an empty range where none meets.
    """
    batch = offset.shape[0]
    q_starts = jnp.arange(0, num_queries, num_q)
    k_starts = jnp.arange(0, num_keys, num_k)
    if causal:
        ends = offset[:, None] + jnp.minimum(q_starts + num_q, num_queries)
        meet = k_starts < ends[:, :, None]
    else:
        meet = jnp.ones((batch, q_starts.size, k_starts.size), bool)
    if ids is not None:
        (q_low, q_high), (k_low, k_high) = id_ranges(ids[0], num_q), id_ranges(ids[1], num_k)
        meet &= (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
    if not over_keys:
        meet = jnp.swapaxes(meet, 1, 2)
    first = jnp.argmax(meet, axis=2)
    stop = meet.shape[2] - jnp.argmax(meet[:, :, ::-1], axis=2)
    stop = jnp.where(jnp.any(meet, axis=2), stop, first)
    return jnp.stack([first.reshape(-1), stop.reshape(-1)]).astype(jnp.int32)


def id_ranges(ids: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return the smallest and largest non-zero id of each tile; an empty range where none is."""
    ids = ids.reshape(ids.shape[0], -1, tokens)
    bounds = jnp.iinfo(ids.dtype)
    low = jnp.min(jnp.where(ids == 0, bounds.max, ids), axis=2)
    return low, jnp.max(jnp.where(ids == 0, bounds.min, ids), axis=2)
