"""The Hopper kernels of `short_conv`, interpreted, against the float64 definition."""

import jax.numpy as jnp
import pytest

from pallas_kernels import interpreted, short_conv
from pallas_kernels.short_conv.mosaic_gpu import GPUTiles
from pallas_kernels.tiles import with_tiles
from tests.kernels.short_conv_cases import (
    TAPS,
    assert_as_definition,
    ids_with_holes,
    make_operands,
    packed_ids,
)

SMALL = GPUTiles(forward_tokens=12, forward_heads=2, backward_tokens=12, backward_heads=1)


def small_tiles():
    return with_tiles(short_conv_gpu=SMALL)


def test_padding_anywhere_and_several_tiles_are_right():
    with small_tiles():
        assert_as_definition("gpu", *make_operands(1, 31, 1), ids_with_holes(1, 31))


@pytest.mark.slow
@pytest.mark.parametrize("ids", [None, packed_ids, ids_with_holes])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_segments_and_states_are_right(ids, dtype):
    operands = make_operands(2, 45, 2, dtype, with_state=dtype == "float32")
    with small_tiles():
        assert_as_definition("gpu", *operands, None if ids is None else ids(2, 45))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 11, 12, 13, 25])
def test_every_length_is_right(length):
    with small_tiles():
        assert_as_definition("gpu", *make_operands(1, length, 1), None)


@pytest.mark.slow
def test_threads_do_not_race():
    with small_tiles():
        assert_as_definition("gpu_races", *make_operands(1, 24, 1), ids_with_holes(1, 24))


def test_unsupported_operands_are_refused():
    with interpreted("gpu"), pytest.raises(NotImplementedError, match="K=64 is not a multiple"):
        short_conv(jnp.zeros((1, 4, 2, 64)), jnp.zeros((TAPS, 2, 64)), implementation="mosaic_gpu")
