"""What the kernels of `kda_decode` share."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from pallas_kernels import checks
from pallas_kernels.kda.gate import shifted_gate


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Static choices of one call.

    Attributes:
        heads: heads of one program.
        scale: multiplies the output.
        lower_bound: of the gate, where there is one.
        beta_logits: beta is before its sigmoid.
        normalize_qk: q and k are before their L2 norm.
        every_state: states and tails after each token are wanted.
    """

    heads: int
    scale: float
    lower_bound: float | None
    beta_logits: bool
    normalize_qk: bool
    every_state: bool

    def gate(self, *parameters) -> Callable | None:
        """Return the gate of A_log [H, 1] and dt_bias [H, K], or None of nothing."""
        if not parameters:
            return None
        rates, bias = parameters

        def gate(logits):
            shifted = logits.astype(jnp.float32) + bias
            return shifted_gate(shifted, jnp.exp(rates), self.lower_bound)

        return gate


def without_gradient(function: Callable, implementation: str) -> Callable:
    """Let a function of one pytree of arrays say that it has no gradient, instead of failing."""
    call = f"kda_decode: implementation={implementation!r}"
    message = f"{call} has no gradient; use 'xla', or kda"
    return checks.without_gradient(function, message)
