"""What each kind of attention remembers between calls, and what a layer is told about a call."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax import ops
from k3jax.config import K3Config


class KDACache(NamedTuple):
    """Recurrent state and convolution tails of one KDA layer."""

    state: jax.Array  # [B, H, K, V] float32, key-major
    q_tail: jax.Array  # [B, W-1, H, K] raw projections, oldest first
    k_tail: jax.Array
    v_tail: jax.Array


class MLACache(NamedTuple):
    """Latents of one MLA layer: keys and values are never expanded in the cache."""

    latent: jax.Array  # [B, S, C] after kv_a_layernorm
    k_rope: jax.Array  # [B, S, r]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CallContext:
    """What every layer of one call shares.

    Without a cache the last three array fields are None.
    """

    segment_ids: jax.Array | None = None  # [B, T]; 0 = padding, None = one segment, all real
    kv_segment_ids: jax.Array | None = None  # [B, S], after this call's tokens were added
    length: jax.Array | None = None  # [] int32, cache columns in use before the call
    fits: jax.Array | None = None  # [] bool; False = the write would pass the end of the cache
    decode: bool = dataclasses.field(default=False, metadata={"static": True})
    statistics: bool = dataclasses.field(default=False, metadata={"static": True})
    # With statistics: also what the auxiliary loss of routers needs, with its gradient.
    auxiliary: bool = dataclasses.field(default=False, metadata={"static": True})
    trace: bool = dataclasses.field(default=False, metadata={"static": True})
    parallel: ops.Parallel = dataclasses.field(
        default=ops.DEFAULT_PARALLEL, metadata={"static": True}
    )

    def keep_old(self, new: jax.Array, old: jax.Array) -> jax.Array:
        """`new`, unless the call does not fit: then the cache stays as it was."""
        return jnp.where(self.fits, new.astype(old.dtype), old)


def empty_layer_cache(
    cfg: K3Config, attention: str, batch: int, capacity: int, dtype
) -> KDACache | MLACache:
    """Zero cache of one layer; `capacity` is the number of MLA positions."""
    if attention == "kda":
        heads, width = cfg.kda.num_heads, cfg.kda.head_dim
        tail = jnp.zeros((batch, cfg.kda.conv_size - 1, heads, width), dtype)
        state = jnp.zeros((batch, heads, width, width), jnp.float32)
        return KDACache(state, tail, tail, tail)
    return MLACache(
        jnp.zeros((batch, capacity, cfg.mla.kv_lora_rank), dtype),
        jnp.zeros((batch, capacity, cfg.mla.qk_rope_head_dim), dtype),
    )


def write_columns(cache: jax.Array, new: jax.Array, context: CallContext) -> jax.Array:
    """Write new [B, T, ...] into cache [B, S, ...] at column `context.length`, if it fits."""
    if new.shape[1] > cache.shape[1]:
        return cache  # cannot fit at any length; context.fits is False
    zero = jnp.zeros_like(context.length)  # of one type with it, also where x64 is on
    starts = (zero, context.length, *(zero,) * (cache.ndim - 2))
    # dynamic slices clamp at the end: what does not fit must rewrite the old values there.
    old = jax.lax.dynamic_slice(cache, starts, (*new.shape[:2], *cache.shape[2:]))
    return jax.lax.dynamic_update_slice(cache, context.keep_old(new, old), starts)
