"""The Hopper kernels of `attention_residual`, interpreted, against the float64 definition."""

import pytest

from pallas_kernels import attention_residual, interpreted
from pallas_kernels.attention_residual import mosaic_gpu
from pallas_kernels.attention_residual.mosaic_gpu import GPUTiles
from pallas_kernels.tiles import with_tiles
from tests.kernels.attention_residual_cases import (
    assert_as_definition,
    assert_as_definition_in_a_chain,
    make_operands,
)

SMALL = GPUTiles(forward_tokens=3, forward_stages=2, backward_tokens=3)


def small_tiles():
    return with_tiles(attention_residual_gpu=SMALL)


def test_odd_sizes_are_right():
    with small_tiles():
        assert_as_definition("gpu", *make_operands(2, 1, 5, 256), 1, traced=True)


@pytest.mark.slow
@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_count_is_right(dtype, count):
    with small_tiles():
        assert_as_definition("gpu", *make_operands(3, 2, 4, 256, dtype), count, traced=count == 2)


@pytest.mark.slow
def test_rows_that_do_not_fit_shared_memory_are_read_twice(monkeypatch):
    # Room for three rows beside the others, of the four of a token.
    monkeypatch.setattr(mosaic_gpu, "_SHARED_BYTES", 8 * 4 * 256)
    assert mosaic_gpu._ring(4, 4 * 256, 5 * 4 * 256) == (False, 3)
    with small_tiles():
        assert_as_definition("gpu", *make_operands(3, 1, 7, 256), 3)


@pytest.mark.slow
def test_threads_do_not_race():
    with small_tiles():
        assert_as_definition("gpu_races", *make_operands(2, 1, 5, 128), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "count", "traced"), [("gpu", 1, True), ("gpu_races", 2, False)])
def test_gradients_of_a_bank_used_twice_are_added_up(mode, count, traced):
    operands, (d_mixed, _) = make_operands(3, 1, 8, 256)
    with small_tiles():
        assert_as_definition_in_a_chain(mode, operands, d_mixed, count, traced=traced, most=2)


def test_unsupported_operands_are_refused():
    (bank, current, query), _ = make_operands(2, 1, 8, 96)
    with interpreted("gpu"), pytest.raises(NotImplementedError, match="D=96 is not a multiple"):
        attention_residual(bank, current, query, 2, eps=1e-5, implementation="mosaic_gpu")
