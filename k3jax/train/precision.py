"""In which types a run holds its parameters and what the optimizer keeps beside them."""

import dataclasses
import typing

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Storage types. Sums of gradients over micro-batches are float32 whatever these are, as are
    decay parameters, convolutions and balancing biases.
    """

    parameters: typing.Literal["float32", "bfloat16"] = "float32"
    """Parameters that the passes read, and activations."""
    master: typing.Literal["float32", "none"] = "float32"
    """Copy of bfloat16 parameters that the optimizer changes; bfloat16 alone loses changes below
    1/256 of a weight. None is kept where the parameters are float32."""
    momentum: typing.Literal["float32", "bfloat16"] = "float32"
    """Moments of the optimizer; they are computed in float32."""

    def master_of(self, params: dict) -> dict:
        """The float32 copies to keep of these parameters, by name."""
        if self.master == "none":
            return {}
        return {
            name: value.astype(jnp.float32)
            for name, value in params.items()
            if value.dtype != jnp.float32
        }

    def as_moments(self, params: dict) -> dict:
        """Parameters in the type of moments, to start them from."""
        return {name: value.astype(self.momentum) for name, value in params.items()}


DEFAULT_PRECISION = PrecisionConfig()
# Many chips: 8 bytes per parameter of a matrix.
LARGE_SCALE = PrecisionConfig(parameters="bfloat16", momentum="bfloat16")
