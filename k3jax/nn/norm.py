"""RMSNorm and the depth mixture of attention residuals."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax import ops
from k3jax.nn.initializers import Constant
from k3jax.nn.parameters import weight


class RMSNorm(nnx.Module):
    """w * x / sqrt(mean(x^2) + eps); every norm states its own eps."""

    def __init__(self, dim: int, eps: float):
        self.eps = eps
        self.weight = weight(None, (dim,), (None,), Constant(1.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return ops.rms_norm(x, self.weight[...], self.eps)


class DepthMix(nnx.Module):
    """Attention over depth with one learned pseudo-query."""

    def __init__(self, dim: int, eps: float):
        self.eps = eps
        self.norm = weight(None, (dim,), (None,), Constant(1.0))
        self.proj = weight(None, (dim,), (None,), Constant(0.0))

    def __call__(
        self,
        bank: jax.Array,
        current: jax.Array,
        count: int | jax.Array,
        most: int | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Mixture of the first `count` entries of bank [N, B, T, D] and current [B, T, D].

        `most` bounds a traced count. See `ops.depth_mix` for the results.
        """
        with jax.named_scope("depth_mix"):
            query = self.norm[...].astype(jnp.float32) * self.proj[...].astype(jnp.float32)
            return ops.depth_mix(bank, current, query, count, eps=self.eps, most=most)
