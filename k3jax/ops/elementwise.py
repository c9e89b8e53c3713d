"""Norms and activations: float32 inside, one cast at the end."""

import jax
import jax.numpy as jnp

from pallas_kernels import SituGLU


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """W * cast(x / sqrt(mean(x^2) + eps)) over the last dimension.

    The cast to `x.dtype` comes before the multiplication by the weight, as released.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * normed.astype(x.dtype)


def gated_rms_norm(x: jax.Array, weight: jax.Array, gate: jax.Array, eps: float) -> jax.Array:
    """X / sqrt(mean(x^2) + eps) * w * sigmoid(gate), float32 throughout, result in gate's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    gated = normed * weight.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return gated.astype(gate.dtype)


def situ(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float | None) -> jax.Array:
    """SiTU-GLU: b1 tanh(a / b1) sigmoid(a) * b2 tanh(b / b2).

    Args:
        gate: a, any shape.
        up: b, same shape.
        beta: b1.
        linear_beta: b2; None leaves b as it is.
    """
    return SituGLU(beta, linear_beta)(gate, up)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(a) * b."""
    return jax.nn.silu(gate) * up


def gelu(x: jax.Array) -> jax.Array:
    """X * Phi(x), the exact form (erf)."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """X / 2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
