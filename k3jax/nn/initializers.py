"""Start values of parameters, each a function of one standard normal draw.

Because every initialiser takes the same kind of draw, `k3jax.init` can draw a whole model at once:
one random-number program to compile instead of one per parameter shape.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Normal:
    """std * z."""

    std: float

    def __call__(self, z: jax.Array) -> jax.Array:
        return self.std * z


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same value everywhere: 1 for norms, 0 for pseudo-queries (uniform depth average)."""

    value: float

    def __call__(self, z: jax.Array) -> jax.Array:
        return jnp.full_like(z, self.value)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Uniform in (-bound, bound)."""

    bound: float

    def __call__(self, z: jax.Array) -> jax.Array:
        return self.bound * (2 * _uniform(z) - 1)


@dataclasses.dataclass(frozen=True)
class LogDecay:
    """A_log: log U(1, 16) for the unbounded gate; 0 for the bounded one, scaled by its bound."""

    bounded: bool

    def __call__(self, z: jax.Array) -> jax.Array:
        return jnp.zeros_like(z) if self.bounded else jnp.log(1 + 15 * _uniform(z))


@dataclasses.dataclass(frozen=True)
class StepBias:
    """dt_bias: inverse softplus of a step drawn log-uniformly from [1e-3, 1e-1], floor 1e-4."""

    def __call__(self, z: jax.Array) -> jax.Array:
        step = jnp.maximum(1e-3 * jnp.exp(jnp.log(100.0) * _uniform(z)), 1e-4)
        return step + jnp.log(-jnp.expm1(-step))


def _uniform(z: jax.Array) -> jax.Array:
    """Uniform in (0, 1) from a standard normal."""
    return jax.scipy.special.ndtr(z)
