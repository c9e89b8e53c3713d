"""The activations of gated experts: elementwise functions of (gate, up) that kernels can trace."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class SituGLU:
    """b1 tanh(a / b1) sigmoid(a) * b2 tanh(b / b2), in float32.

    Attributes:
        beta: b1.
        linear_beta: b2; None leaves b as it is.
    """

    beta: float
    linear_beta: float | None = None

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """a, b -> their activation in the dtype of `gate`."""
        a, b = gate.astype(jnp.float32), up.astype(jnp.float32)
        if self.linear_beta is not None:
            b = self.linear_beta * jnp.tanh(b / self.linear_beta)
        return (self.beta * jnp.tanh(a / self.beta) * jax.nn.sigmoid(a) * b).astype(gate.dtype)


@dataclasses.dataclass(frozen=True)
class SwiGLU:
    """a sigmoid(a) * b."""

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return gate * jax.nn.sigmoid(gate) * up
