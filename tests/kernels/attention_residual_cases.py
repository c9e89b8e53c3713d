"""Operands of `attention_residual`, and the check that its kernels share."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention_residual
from tests.kernels.compare import assert_kernel_as_definition


def make_operands(num_entries, batch, length, width, dtype="float32"):
    """bank, current, query, and the gradients of mixed and probabilities."""
    rng = np.random.default_rng(num_entries + length)
    shape = (batch, length, width)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    query = jnp.asarray(rng.normal(size=width) * 3 / width**0.5, dtype)
    sizes = np.geomspace(0.1, 10, max(num_entries, 1))[:num_entries, None, None, None]
    bank = jnp.asarray(rng.normal(size=(num_entries, *shape)) * sizes, dtype)
    d_probabilities = jnp.asarray(rng.normal(size=(batch, length, num_entries + 1)), jnp.float32)
    return (bank, normal(*shape), query), (normal(*shape), d_probabilities)


def assert_as_definition(mode, operands, cotangents, count, *, traced=False):
    """Compare with NaN in the entries that do not exist; their gradients must be 0."""

    def function(implementation, bank, current, query):
        def run(count):
            return attention_residual(
                bank, current, query, count, eps=1e-5, implementation=implementation
            )

        return jax.jit(run)(count) if traced else run(count)

    def spoil(operands, cotangents):
        bank, *others = operands
        return (bank.at[count:].set(jnp.nan), *others), cotangents

    _, probabilities, d_bank, *_ = assert_kernel_as_definition(
        mode, function, operands, cotangents, spoil=spoil
    )
    num_entries = operands[0].shape[0]
    assert not np.any(d_bank[count:]) and not np.any(probabilities[..., count:num_entries])


def assert_as_definition_in_a_chain(mode, operands, d_mixed, count, *, traced, most):
    """Compare two mixtures of one bank, the second's from the first's result, changed between."""

    def function(implementation, bank, current, query):
        def run(count):
            def mix(bank, current, query):
                return attention_residual(
                    bank, current, query, count, eps=1e-5, most=most, return_bank=True,
                    implementation=implementation,
                )  # fmt: skip

            first, _, bank_after = mix(bank, current, query)
            second, _, _ = mix(bank_after.at[0].multiply(0.5), first, 2 * query)
            return first + second

        return (jax.jit(run)(count) if traced else run(count),)

    def spoil(operands, cotangents):
        bank, *others = operands
        return (bank.at[count:].set(jnp.nan), *others), cotangents

    _, d_bank, *_ = assert_kernel_as_definition(mode, function, operands, (d_mixed,), spoil=spoil)
    assert not np.any(d_bank[count:])
