"""The TPU kernels of `attention_residual`, interpreted, against the float64 definition."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import attention_residual, choices_made, interpreted
from pallas_kernels.attention_residual.mosaic_tpu import Tiles
from pallas_kernels.tiles import with_tiles
from pallas_kernels.traffic import count_traffic
from tests.kernels.attention_residual_cases import (
    assert_as_definition,
    assert_as_definition_in_a_chain,
    make_operands,
)

SMALL = Tiles(forward_tokens=32, backward_tokens=16)


def small_tiles():
    return with_tiles(attention_residual_tpu=SMALL)


def test_odd_sizes_are_right():
    with small_tiles():
        assert_as_definition("tpu", *make_operands(2, 2, 37, 384), 1, traced=True)


@pytest.mark.slow
def test_bfloat16_rows_are_right():
    assert_as_definition("tpu", *make_operands(3, 1, 21, 128, "bfloat16"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_count_is_right(dtype, count, traced):
    with small_tiles():
        assert_as_definition("tpu", *make_operands(4, 1, 70, 256, dtype), count, traced=traced)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (5, 1), (1, 15), (2, 16), (1, 129)])
def test_every_length_is_right(batch, length):
    assert_as_definition("tpu", *make_operands(2, batch, length, 640), 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tpu_poisoned", "tpu_races"])
@pytest.mark.parametrize("traced", [False, True])
def test_nothing_unwritten_is_read_and_two_cores_do_not_race(mode, traced):
    with small_tiles():
        assert_as_definition(mode, *make_operands(2, 1, 37, 128), 1, traced=traced)


@pytest.mark.parametrize("count", [2, 4])
def test_traffic_is_as_estimated_and_every_row_is_read_once(count):
    (bank, current, query), (d_mixed, _) = make_operands(4, 2, 37, 384, "bfloat16")

    def run(*operands):
        def mix(*operands):
            return attention_residual(*operands, count, eps=1e-5, implementation="mosaic_tpu")[0]

        return jax.vjp(mix, *operands)[1](d_mixed)

    with interpreted("tpu"), small_tiles():
        calls = count_traffic(run, bank, current, query)
    assert [call.bytes for call in calls] == [c.cost_estimate.bytes_accessed for c in calls]
    row, statistics = current.size * 2, 2 * 37 * 128 * 4
    forward, backward = (call.bytes for call in calls)
    assert forward == (count + 2) * row + statistics + 4 * 384
    d_query = 4 * 384 * 2 * 3  # one sum per tile of tokens
    assert backward == (count + 2 + 4 + 1) * row + 2 * statistics + 4 * 384 + d_query


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "length", "count", "traced"),
    # The poisoned interpreter returns an aliased output with the rows of its last, partial block:
    # whole blocks there.
    [
        ("tpu", 37, 0, True),
        ("tpu", 37, 1, True),
        ("tpu", 37, 2, False),
        ("tpu_poisoned", 48, 1, True),
    ],
)
def test_gradients_of_a_bank_used_twice_are_added_up(mode, length, count, traced):
    operands, (d_mixed, _) = make_operands(3, 1, length, 256)
    with small_tiles():
        assert_as_definition_in_a_chain(mode, operands, d_mixed, count, traced=traced, most=2)


def test_accumulated_gradients_move_only_what_exists():
    (bank, current, query), (d_mixed, _) = make_operands(6, 1, 37, 256, "bfloat16")

    def run(bank, current, query, d_bank):
        def mix(*operands):
            mixed, _, bank = attention_residual(
                *operands, 2, eps=1e-5, return_bank=True, implementation="mosaic_tpu"
            )
            return mixed, bank

        return jax.vjp(mix, bank, current, query)[1]((d_mixed, d_bank))

    with interpreted("tpu"):
        _, backward = count_traffic(run, bank, current, query, bank)
    assert backward.bytes == backward.cost_estimate.bytes_accessed
    rows = 2 + 2 + 2 + 3  # bank, gradients so far in and out; current, its gradient, d_mixed
    assert backward.bytes == rows * 2 * current.size + 2 * 37 * 512 + 2 * 4 * 256


def test_unsupported_operands_are_refused_or_left_to_xla():
    (bank, current, query), _ = make_operands(2, 1, 8, 96)
    with interpreted("tpu"):
        with pytest.raises(NotImplementedError, match="D=96 is not a multiple of 128"):
            attention_residual(bank, current, query, 2, eps=1e-5, implementation="mosaic_tpu")
        with pytest.raises(NotImplementedError, match="bank has dtype bfloat16 and current flo"):
            attention_residual(
                jnp.zeros((1, 1, 8, 128), jnp.bfloat16), jnp.zeros((1, 8, 128)), jnp.zeros(128),
                1, eps=1e-5, implementation="mosaic_tpu",
            )  # fmt: skip
        attention_residual(bank, current, query, 2, eps=1e-5)
    assert choices_made()[-1].implementation == "xla"
