"""Operands of `cross_entropy`, and the comparison of a kernel with the float64 definition."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cross_entropy
from tests.kernels.errors import assert_within

# x, weight, targets and the gradients of losses and logsumexp.
Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def make_operands(
    num_tokens: int, width: int, vocabulary: int, dtype="float32", scale: float = 3.0
) -> Operands:
    """Logits of standard deviation `scale`; the first and last id and an ignored NaN row occur."""
    random = np.random.default_rng(num_tokens + vocabulary)
    x = random.normal(size=(num_tokens, width))
    weight = random.normal(size=(width, vocabulary)) * scale * width**-0.5
    targets = random.integers(0, vocabulary, num_tokens)
    targets[0] = vocabulary - 1
    targets[num_tokens // 2] = 0
    ignored = [num_tokens - 1, num_tokens // 3]
    targets[ignored], x[ignored] = -1, np.nan
    d_losses, d_logsumexp = random.normal(size=(2, num_tokens))
    return (
        jnp.asarray(x, dtype), jnp.asarray(weight, dtype), jnp.asarray(targets, jnp.int32),
        jnp.asarray(d_losses, jnp.float32), jnp.asarray(d_logsumexp, jnp.float32),
    )  # fmt: skip


def run(implementation: str, operands: Operands) -> dict[str, jax.Array]:
    """Losses, logsumexp and both gradients."""
    x, weight, targets, *cotangents = operands

    def call(x, weight):
        return cross_entropy(
            x, weight, targets, return_logsumexp=True, implementation=implementation
        )

    (losses, logsumexp), transpose = jax.vjp(call, x, weight)
    cotangents = tuple(c.astype(losses.dtype) for c in cotangents)
    d_x, d_weight = transpose(cotangents)
    return {"losses": losses, "logsumexp": logsumexp, "d_x": d_x, "d_weight": d_weight}


def assert_as_definition(implementation: str, operands: Operands) -> dict[str, jax.Array]:
    """Assert that all results are within the bounds of float64, and return them."""
    dtype = operands[0].dtype
    actual = jax.jit(run, static_argnums=0)(implementation, operands)
    assert actual["d_x"].dtype == actual["d_weight"].dtype == dtype
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in operands]
        exact[2] = operands[2]
        expected = jax.jit(run, static_argnums=0)("reference", tuple(exact))
    ignored = np.asarray(operands[2]) < 0
    for name, value in expected.items():
        assert value.dtype == jnp.float64
        # Losses are float32 sums of products of exact operands, whatever the operands' type.
        bound = "float32" if name in ("losses", "logsumexp") else dtype.name
        assert_within(actual[name], value, bound, name)
        if name != "d_weight":
            assert not np.any(np.asarray(actual[name], np.float32)[ignored]), name
    return actual
