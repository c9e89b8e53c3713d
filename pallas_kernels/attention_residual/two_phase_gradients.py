"""Gradients of the two phases as kernels: those of their forms in `jax.numpy`, recomputed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.attention_residual import xla


def _with_gradients_of(form: Callable, kernel: Callable) -> Callable:
    """Return `kernel(floats, integer)`, differentiated as `form` with the same arguments is.

    Args:
        form: (tuple of arrays, int32 [] or None) -> arrays, in `jax.numpy`.
        kernel: the same function as a kernel.
    """

    @jax.custom_vjp
    def call(floats, integer):
        return kernel(floats, integer)

    def forward(floats, integer):
        return kernel(floats, integer), (floats, integer)

    def backward(operands, cotangents):
        floats, integer = operands
        _, transpose = jax.vjp(lambda *floats: form(floats, integer), *floats)
        return transpose(cotangents), None

    call.defvjp(forward, backward)
    return call


def block_with(kernel: Callable, bank, queries, count, eps):
    """The first phase by kernel(bank, queries, count, eps), differentiable."""
    if bank.shape[0] == 0 or (isinstance(count, int) and count == 0):
        return xla.attention_residual_block(bank, queries, 0, eps)

    def run(function):
        def call(operands, traced):
            return function(*operands, count if traced is None else traced, eps)

        return call

    call = _with_gradients_of(run(xla.attention_residual_block), run(kernel))
    traced = None if isinstance(count, int) else count
    return call((bank, queries.astype(jnp.float32)), traced)


def merge_with(kernel: Callable, weighted, index, maximum, total, current, query, eps):
    """The second phase by kernel(weighted, maximum, .., query, index, eps), differentiable."""

    def run(operands, traced):
        return kernel(*operands, index if traced is None else traced, eps)

    def form(operands, traced):
        weighted, *others = operands
        weighted = weighted[index if traced is None else traced]
        return xla.attention_residual_merge(weighted, *others, eps)

    operands = (weighted, maximum, total, current, query.astype(jnp.float32))
    call = _with_gradients_of(form, run)
    return call(operands, None if isinstance(index, int) else index)
