import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import (
    attention_residual,
    attention_residual_block,
    attention_residual_merge,
    debug_checks,
    interpreted,
)
from pallas_kernels.attention_residual import xla
from tests.pallas_kernels.compare import (
    DATA,
    REPLICATED,
    assert_matches_definition,
    assert_same_per_device,
    normal,
    values_and_gradients,
)
from tests.tolerances import assert_close

N, B, T, D = 5, 2, 3, 7
BANK, CURRENT, QUERY = normal(0, N, B, T, D), normal(1, B, T, D), normal(2, D)


@pytest.mark.parametrize("count", [0, 3, N])
@pytest.mark.parametrize("traced", [False, True])
def test_attention_residual_matches_definition(count, traced):
    def op(implementation, bank, current, query):
        def run(count):
            return attention_residual(
                bank, current, query, count, eps=1e-5, implementation=implementation
            )

        return jax.jit(run)(count) if traced else run(count)

    (_, probabilities), (d_bank, *_) = assert_matches_definition(op, (BANK, CURRENT, QUERY))
    assert probabilities.shape == (B, T, N + 1) and probabilities.dtype == jnp.float32
    assert not np.any(probabilities[..., count:N]) and not np.any(d_bank[count:])


def test_attention_residual_in_bfloat16_matches_definition():
    def op(implementation, bank, current, query):
        return attention_residual(bank, current, query, 4, eps=1e-5, implementation=implementation)

    (mixed, probabilities), _ = assert_matches_definition(op, (BANK, CURRENT, QUERY), "bfloat16")
    assert mixed.dtype == jnp.bfloat16 and probabilities.dtype == jnp.float32


def test_attention_residual_by_short_products_is_as_exact(monkeypatch):
    """Accelerators multiply bfloat16 rows with the query in three bfloat16 parts."""
    monkeypatch.setattr(xla, "_is_short", lambda rows: True)

    def op(implementation, bank, current, query):
        return attention_residual(bank, current, query, 4, eps=1e-5, implementation=implementation)

    query = np.asarray(jnp.asarray(QUERY, jnp.bfloat16)) / 3  # more bits than bfloat16 has
    operands = (jnp.asarray(BANK, jnp.bfloat16), jnp.asarray(CURRENT, jnp.bfloat16))
    _, probabilities = op("xla", *operands, jnp.float32(query))
    _, expected = op("reference", *operands, jnp.float32(query))
    assert_close(probabilities, expected)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_attention_residual_returns_the_bank_and_looks_at_no_more_than_most(implementation):
    bank = jnp.float32(BANK).at[3:].set(jnp.nan)

    @jax.jit
    def run(count):
        return attention_residual(
            bank, jnp.float32(CURRENT), jnp.float32(QUERY), count, eps=1e-5, most=3,
            return_bank=True, implementation=implementation,
        )  # fmt: skip

    mixed, probabilities, same = run(2)
    assert np.isfinite(mixed).all() and probabilities.shape == (B, T, N + 1)
    np.testing.assert_array_equal(same, bank)
    with pytest.raises(ValueError, match=r"most=6 is outside 0\.\.5"):
        attention_residual(bank, jnp.float32(CURRENT), jnp.float32(QUERY), 2, eps=1e-5, most=6)


def test_attention_residual_of_large_rows_matches_definition():
    """Scores do not depend on the size of a row, and rows of very unlike sizes are mixed."""

    def op(implementation, bank, current, query):
        return attention_residual(bank, current, query, N, eps=1e-5, implementation=implementation)

    sizes = np.array([1e-3, 1.0, 30.0, 1e3, 1e-2])[:, None, None, None]
    assert_matches_definition(op, (BANK * sizes, CURRENT, 5 * QUERY))


@pytest.mark.parametrize("traced", [False, True])
def test_attention_residual_does_not_read_entries_past_count(traced):
    exists = np.arange(N)[:, None, None, None] < 2
    poisoned = jnp.where(exists, jnp.float32(BANK), jnp.nan)
    cotangents = [normal(3, B, T, D), normal(4, B, T, N + 1)]

    def op(*operands):
        count = jnp.minimum(2, operands[0].shape[0]) if traced else 2
        return attention_residual(*operands, count, eps=1e-5)

    operands = (jnp.float32(CURRENT), jnp.float32(QUERY))
    outputs, gradients = values_and_gradients(op, (poisoned, *operands), cotangents)
    clean = jnp.where(exists, poisoned, 0)
    expected_outputs, expected_gradients = values_and_gradients(op, (clean, *operands), cotangents)
    for actual, expected in zip(outputs, expected_outputs, strict=True):
        assert_close(actual, expected)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, expected, gradient=True)
    assert not np.any(gradients[0][2:])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_attention_residual_without_a_bank_is_the_current_sum(implementation):
    current = jnp.float32(CURRENT)
    bank = jnp.zeros((0, B, T, D))
    mixed, probabilities = attention_residual(
        bank, current, jnp.float32(QUERY), 0, eps=1e-5, implementation=implementation
    )
    np.testing.assert_array_equal(mixed, current)
    np.testing.assert_array_equal(probabilities, np.ones((B, T, 1)))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_attention_residual_with_zero_query_is_the_mean(implementation):
    mixed, probabilities = attention_residual(
        jnp.float32(BANK),
        jnp.float32(CURRENT),
        jnp.zeros(D),
        3,
        eps=1e-5,
        implementation=implementation,
    )
    assert_close(mixed, (BANK[:3].sum(axis=0) + CURRENT) / 4)
    assert_close(probabilities[..., [0, 1, 2, N]], np.full((B, T, 4), 0.25))


def test_attention_residual_stores_no_float32_copy_of_bfloat16_rows():
    def op(*operands):
        return attention_residual(*operands, N, eps=1e-5)

    operands = tuple(jnp.asarray(operand, jnp.bfloat16) for operand in (BANK, CURRENT, QUERY))
    _, transpose = jax.vjp(op, *operands)
    largest = max(leaf.size for leaf in jax.tree.leaves(transpose) if leaf.dtype == jnp.float32)
    assert largest <= (N + 1) * B * T


def test_attention_residual_per_device_equals_one_device():
    def op(bank, current, query):
        return list(attention_residual(bank, current, query, 3, eps=1e-5))

    specs = [PartitionSpec(None, "data"), DATA, REPLICATED]
    assert_same_per_device(op, (BANK, CURRENT, QUERY), specs, [DATA, DATA])


def test_attention_residual_refuses_bad_input():
    bank, current, query = (jnp.float32(array) for array in (BANK, CURRENT, QUERY))
    with pytest.raises(ValueError, match=r"bank has shape \(5, 2, 3, 6\); expected \(5, 2, 3, 7\)"):
        attention_residual(bank[..., :6], current, query, 1, eps=1e-5)
    with pytest.raises(ValueError, match=r"query has shape \(6,\); expected \(7,\)"):
        attention_residual(bank, current, query[:6], 1, eps=1e-5)
    with pytest.raises(ValueError, match=r"count=6 is outside 0\.\.5"):
        attention_residual(bank, current, query, 6, eps=1e-5)
    with pytest.raises(TypeError, match=r"count=1\.0 must be an int or an int32 scalar"):
        attention_residual(bank, current, query, 1.0, eps=1e-5)
    with pytest.raises(ValueError, match="count=3 is larger than most=2"):
        attention_residual(bank, current, query, jnp.int32(3), eps=1e-5, most=2)
    with pytest.raises(ValueError, match="eps=0 must be a positive number"):
        attention_residual(bank, current, query, 1, eps=0)
    partial = attention_residual_block(bank, query[None], 2, eps=1e-5)
    with pytest.raises(ValueError, match=r"index=1 is outside 0\.\.0"):
        attention_residual_merge(partial, current, query, index=jnp.int32(1), eps=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(("count", "most"), [(3, 2), (N + 1, None), (-1, None), (1, 0)])
def test_traced_count_out_of_range_gives_nan_and_is_reported(count, most, implementation):
    bank, current, query = (jnp.float32(array) for array in (BANK, CURRENT, QUERY))
    op = functools.partial(attention_residual, eps=1e-5, most=most, implementation=implementation)
    mixed = jax.jit(lambda count: op(bank, current, query, count)[0])(count)
    assert np.isnan(mixed).all()
    with debug_checks(), pytest.raises(jax.errors.JaxRuntimeError, match=f"count={count} is outs"):
        jax.block_until_ready(jax.jit(lambda n: op(bank, current, query, n))(count))


def test_traced_index_out_of_range_gives_nan():
    bank, current, query = (jnp.float32(array) for array in (BANK, CURRENT, QUERY))
    partial = attention_residual_block(bank, query[None], 2, eps=1e-5)
    merge = functools.partial(attention_residual_merge, partial, current, query, eps=1e-5)
    assert np.isnan(jax.jit(lambda index: merge(index=index))(1)).all()
    assert np.isfinite(jax.jit(lambda index: merge(index=index))(0)).all()


def test_empty_rows_need_no_kernel():
    empty, query = jnp.zeros((B, 0, 128)), jnp.zeros(128)
    mixed, _ = attention_residual(jnp.zeros((N, B, 0, 128)), empty, query, 2, eps=1e-5)
    assert mixed.shape == empty.shape
    with interpreted("tpu"), pytest.raises(NotImplementedError, match="empty; use 'xla'"):
        attention_residual(
            jnp.zeros((N, B, 0, 128)), empty, query, 2, eps=1e-5, implementation="mosaic_tpu"
        )
