"""The depth mixture in two phases equals the one in one: all forms, interpreted kernels too."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import attention_residual_block, attention_residual_merge, interpreted
from pallas_kernels.traffic import count_traffic
from tests.kernels.attention_residual_cases import make_operands
from tests.kernels.compare import values_and_gradients
from tests.kernels.errors import assert_within

NUM_QUERIES = 3


def two_phases(implementation, count, *, traced):
    """The mixtures of two of the queries, from one pass over the bank."""

    def mix(count, indices, bank, current, queries):
        partial = attention_residual_block(
            bank, queries, count, eps=1e-5, implementation=implementation
        )
        return [
            attention_residual_merge(
                partial, current, queries[index], index=index, eps=1e-5,
                implementation=implementation,
            )
            for index in indices
        ]  # fmt: skip

    def run(*operands):
        if traced:
            return jax.jit(mix)(count, [0, 2], *operands)
        return mix(count, [0, 2], *operands)

    return run


def one_phase(count):
    def run(bank, current, queries):
        return [
            pallas_kernels.attention_residual(
                bank, current, queries[index], count, eps=1e-5, implementation="reference"
            )[0]
            for index in (0, 2)
        ]

    return run


def assert_as_one_phase(mode, operands, count, *, traced):
    """mode: of `interpreted`, or the name of a form that needs none."""
    (bank, current, query), (d_mixed, _) = operands
    queries = query.astype(jnp.float32) * jnp.array([[1.0], [-0.5], [2.0]])
    cotangents = (d_mixed, 2 * d_mixed)
    is_kernel = mode in pallas_kernels.interpret.MODES
    implementation = "mosaic_" + mode.split("_")[0] if is_kernel else mode
    with interpreted(mode) if is_kernel else contextlib.nullcontext():
        actual = values_and_gradients(
            two_phases(implementation, count, traced=traced),
            (bank.at[count:].set(jnp.nan), current, queries),
            cotangents,
        )
    with jax.enable_x64(True):
        exact = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x, np.float64)),
            ((bank, current, queries), cotangents),
        )
        expected = values_and_gradients(one_phase(count), *exact)
    for n, (one, two) in enumerate(zip(actual, expected, strict=True)):
        assert_within(one, two, str(bank.dtype), name=f"result {n}")


@pytest.mark.parametrize("form", [pytest.param("reference", marks=pytest.mark.slow), "xla"])
@pytest.mark.parametrize(("count", "traced"), [(0, True), (2, False)])
def test_two_phases_equal_one(form, count, traced):
    assert_as_one_phase(form, make_operands(2, 2, 5, 24), count, traced=traced)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 2, 3])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_for_tpu_equal_one_phase(count, traced, dtype):
    assert_as_one_phase("tpu", make_operands(3, 2, 37, 256, dtype), count, traced=traced)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tpu_poisoned", "tpu_races"])
def test_nothing_unwritten_is_read_and_two_cores_do_not_race(mode):
    assert_as_one_phase(mode, make_operands(2, 1, 40, 128), 1, traced=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gpu", "gpu_races"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_for_gpu_equal_one_phase(mode, dtype):
    assert_as_one_phase(mode, make_operands(2, 1, 4, 256, dtype), 2, traced=mode == "gpu")


def test_the_bank_is_read_once_for_all_queries():
    (bank, current, query), _ = make_operands(4, 2, 37, 256, "bfloat16")
    queries = query.astype(jnp.float32)[None] * jnp.ones((NUM_QUERIES, 1))

    def run(implementation, bank, current, queries):
        return two_phases(implementation, 3, traced=False)(bank, current, queries)

    with interpreted("tpu"):
        calls = count_traffic(
            lambda *operands: run("mosaic_tpu", *operands), bank, current, queries
        )
    assert [call.bytes for call in calls] == [c.cost_estimate.bytes_accessed for c in calls]
    row = current.size
    assert calls[0].bytes == row * (3 * 2 + NUM_QUERIES * 4) + queries.nbytes + 2 * 2 * 37 * 512
    assert calls[1].bytes == row * (4 + 2 + 2) + 4 * 256 + 2 * 2 * 37 * 4


def test_bad_input_is_refused():
    bank, current, queries = jnp.zeros((2, 1, 3, 8)), jnp.zeros((1, 3, 8)), jnp.zeros((4, 8))
    with pytest.raises(ValueError, match=r"attention_residual_block: count=3 is outside 0\.\.2"):
        attention_residual_block(bank, queries, 3, eps=1e-5)
    with pytest.raises(ValueError, match=r"queries has shape \(4, 7\); expected \(4, 8\)"):
        attention_residual_block(bank, queries[:, :7], 2, eps=1e-5)
    partial = attention_residual_block(bank, queries, 2, eps=1e-5)
    with pytest.raises(ValueError, match=r"index=4 is outside 0\.\.3, the queries"):
        attention_residual_merge(partial, current, queries[0], index=4, eps=1e-5)
    with pytest.raises(TypeError, match=r"index=1\.0 must be an int"):
        attention_residual_merge(partial, current, queries[0], index=1.0, eps=1e-5)
    with interpreted("tpu"), pytest.raises(NotImplementedError, match="D=8 is not a multiple of"):
        attention_residual_block(bank, queries, 2, eps=1e-5, implementation="mosaic_tpu")
