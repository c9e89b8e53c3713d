"""The Hopper kernels of KDA, interpreted, against the definition in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels.kda.mosaic_gpu import kda_mosaic_gpu
from pallas_kernels.kda.reference import kda_reference
from tests.kernels.errors import assert_within

NAMES = ("q", "k", "v", "log_decay", "beta", "initial_state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Random arrays of one call."""

    tokens: int
    heads: int = 1
    key_dim: int = 64
    value_dim: int = 64
    lowest: float = -5.0
    highest: float = 0.0
    similar: float = 0.0
    largest_beta: float = 1.0
    segment_ids: list | None = None
    runs: int | None = None
    continues: list | None = None
    decay_dtype: str = "float32"

    def arrays(self):
        """Return the operands, and cotangents of the results."""
        rng = np.random.default_rng(self.tokens)
        shape = (1, self.tokens, self.heads, self.key_dim)
        common = self.similar * rng.normal(size=self.key_dim)
        q, k = (rng.normal(size=shape) + common for _ in range(2))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        v, d_output = (rng.normal(size=(*shape[:3], self.value_dim)) for _ in range(2))
        log_decay = rng.uniform(self.lowest, self.highest, size=shape)
        beta = rng.uniform(0 if self.largest_beta else 1, 1, size=shape[:3])
        state_shape = (1, self.runs or 1, self.heads, self.key_dim, self.value_dim)
        state, d_state = (rng.normal(size=state_shape) for _ in range(2))
        bf16, f32 = jnp.bfloat16, jnp.float32
        operands = tuple(
            jnp.asarray(x, dtype)
            for x, dtype in zip(
                (q, k, v, log_decay, beta, state),
                (bf16, bf16, bf16, self.decay_dtype, f32, f32),
                strict=True,
            )
        )
        return operands, (jnp.asarray(d_output, bf16), jnp.asarray(d_state, f32))


def run_kernel(case, operands, cotangents):
    def call(q, k, v, log_decay, beta, state):
        return kda_mosaic_gpu(
            q, k, v, log_decay, beta, scale=case.key_dim**-0.5, initial_state=state,
            segment_ids=_ids(case), per_run=case.runs is not None,
            continues=None if case.continues is None else jnp.asarray([case.continues]),
            log_decay_min=-5.0,
        )  # fmt: skip

    results, transpose = jax.vjp(call, *operands)
    return results, transpose(cotangents)


def run_definition(case, operands, cotangents):
    def call(q, k, v, log_decay, beta, state):
        return kda_reference(
            q, k, v, log_decay, beta, scale=case.key_dim**-0.5, initial_state=state,
            segment_ids=_ids(case), per_run=case.runs is not None,
        )[:2]  # fmt: skip

    with jax.enable_x64(True):
        doubles = [jnp.asarray(np.asarray(x, np.float64)) for x in (*operands, *cotangents)]
        results, transpose = jax.vjp(call, *doubles[:6])
        return results, transpose(tuple(doubles[6:]))


def _ids(case):
    return None if case.segment_ids is None else jnp.asarray([case.segment_ids], jnp.int32)


def check(case):
    """Assert that results and gradients are within the bound of bfloat16 operands."""
    operands, cotangents = case.arrays()
    results, gradients = run_kernel(case, operands, cotangents)
    expected, expected_gradients = run_definition(case, operands, cotangents)
    for name, x, y in zip(("output", "state"), results, expected, strict=True):
        assert_within(x, y, "bfloat16", name)
    for name, x, y in zip(NAMES, gradients, expected_gradients, strict=True):
        assert_within(x, y, "bfloat16", f"gradient of {name}")


def test_odd_length_equals_the_definition():
    with pallas_kernels.interpreted("gpu"):
        check(Case(tokens=70))
