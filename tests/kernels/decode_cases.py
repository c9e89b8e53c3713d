"""Inputs of `kda_decode` as its layer gives them, and the comparison with the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KDAConv, KDAGate, kda_decode
from tests.kernels.errors import assert_within
from tests.pallas_kernels.compare import normal


def make_operands(num_tokens, dtype="float32", *, rows=2, heads=3, key_dim=128, value_dim=128):
    """Return raw tokens, gate, convolutions and state, the tokens rounded to `dtype`."""
    shapes = ((heads, key_dim), (heads, key_dim), (heads, value_dim), (heads, key_dim), (heads,))
    tokens = [
        jnp.asarray(normal(n, rows, num_tokens, *shape), dtype) for n, shape in enumerate(shapes)
    ]
    weights = tuple(jnp.asarray(normal(10 + n, 4, *s), "float32") for n, s in enumerate(shapes[:3]))
    tails = tuple(jnp.asarray(normal(20 + n, rows, 3, *s), dtype) for n, s in enumerate(shapes[:3]))
    return {
        "tokens": tokens,
        "A_log": jnp.asarray(normal(5, heads), jnp.float32),
        "dt_bias": jnp.asarray(normal(6, heads, key_dim), jnp.float32),
        "conv": KDAConv(weights, tails),
        "state": jnp.asarray(normal(9, rows, heads, key_dim, value_dim), jnp.float32),
    }


def decode(implementation, operands, *, fused=True, lower_bound=-5.0, **options):
    """Run `kda_decode` on what `make_operands` returns, with all options or none."""
    q, k, v, logits, beta = operands["tokens"]
    if not fused:
        # Unit keys and activated gates, as far as the dtype goes.
        tokens = (q / 10, k / 10, v, -jnp.abs(logits), jax.nn.sigmoid(beta))
        return kda_decode(*tokens, operands["state"], implementation=implementation, **options)
    gate = KDAGate(A_log=operands["A_log"], dt_bias=operands["dt_bias"], lower_bound=lower_bound)
    return kda_decode(
        q, k, v, logits, beta, operands["state"], gate=gate, conv=operands["conv"],
        beta_logits=True, normalize_qk=True, implementation=implementation, **options,
    )  # fmt: skip


def assert_as_definition(implementation, operands, dtype, **options):
    """Assert that outputs, states and tails agree with the definition in float64."""
    run = functools.partial(decode, **options)
    actual = jax.tree.leaves(jax.jit(functools.partial(run, implementation))(operands))
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), operands)
        expected = jax.tree.leaves(run("reference", double))
    for n, (one, two) in enumerate(zip(actual, expected, strict=True)):
        assert_within(one, two, dtype, name=f"result {n}")
