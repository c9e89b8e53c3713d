"""The activations of gated experts: elementwise functions of (gate, up) that kernels can trace."""

import dataclasses
from collections.abc import Callable

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


def gradients_of(activation: Callable) -> Callable:
    """(gate, up, gradient of the activation) -> gradients of gate and up, for a kernel to trace.

    Sums of gradients are a primitive of their own in jax, which Mosaic GPU does not know; here
    they are plain additions.
    """

    def gradients(gate, up, d_activation):
        _, transpose = jax.vjp(activation, gate, up)
        return transpose(d_activation.astype(gate.dtype))

    def traced(*operands):
        closed = jax.make_jaxpr(gradients)(*operands)
        return _evaluate(closed.jaxpr, closed.consts, operands)

    return traced


def _evaluate(jaxpr, constants, operands):
    """The results of a jaxpr, with functions inlined and `add_any` replaced."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *operands], strict=True))

    def read(atom):
        return atom.val if hasattr(atom, "val") else known[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"]
            results = _evaluate(inner.jaxpr, inner.consts, inputs)
        elif eqn.primitive.name == "add_any":
            results = [jax.lax.add(*inputs)]
        else:
            results = eqn.primitive.bind(*inputs, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
