"""Keys and values of latents."""

import jax
import jax.numpy as jnp

from k3jax.precision import matmul_precision


def expand(joint: jax.Array, kv_b: jax.Array, nope_dim: int) -> tuple[jax.Array, jax.Array]:
    """Keys [B, S, H, n + r] and values [B, S, H, V] of latents and shared channels side by side."""
    latent, k_rope = jnp.split(joint, [kv_b.shape[0]], axis=-1)
    expanded = jnp.einsum("bsc,chn->bshn", latent, kv_b, precision=matmul_precision(joint.dtype))
    shared = jnp.broadcast_to(k_rope[:, :, None, :], (*expanded.shape[:3], k_rope.shape[-1]))
    k = jnp.concatenate([expanded[..., :nope_dim], shared], axis=-1)
    return k, expanded[..., nope_dim:]
