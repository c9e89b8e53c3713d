"""The Hopper kernels of `cross_entropy`, interpreted, against the float64 definition."""

import pytest

from pallas_kernels import cross_entropy, interpreted
from pallas_kernels.cross_entropy.mosaic_gpu import CrossEntropyGPUTiles
from pallas_kernels.tiles import with_tiles
from tests.kernels.cross_entropy_cases import assert_as_definition, make_operands

IMPLEMENTATION = "mosaic_gpu"
# Tiles of 64 columns, two shares of the vocabulary, several chunks; the ring turns often.
SMALL = CrossEntropyGPUTiles(columns=64, stages=2, blocks=2, chunk=1 << 14)


def test_odd_sizes_are_right():
    with interpreted("gpu"), with_tiles(cross_entropy_gpu=SMALL):
        assert_as_definition(IMPLEMENTATION, make_operands(70, 128, 130, "bfloat16"))


@pytest.mark.slow
def test_float32_is_multiplied_in_three_parts():
    with interpreted("gpu"), with_tiles(cross_entropy_gpu=SMALL):
        assert_as_definition(IMPLEMENTATION, make_operands(70, 128, 130, "float32"))


@pytest.mark.slow
def test_large_logits_do_not_overflow():
    with interpreted("gpu"), with_tiles(cross_entropy_gpu=SMALL):
        assert_as_definition(IMPLEMENTATION, make_operands(70, 64, 130, "bfloat16", scale=1e4))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 64, 64), (130, 192, 256)])
def test_more_sizes_are_right(shape):
    with interpreted("gpu"):
        assert_as_definition(IMPLEMENTATION, make_operands(*shape, "bfloat16"))


@pytest.mark.slow
def test_blocks_do_not_race():
    with interpreted("gpu_races"), with_tiles(cross_entropy_gpu=SMALL):
        assert_as_definition(IMPLEMENTATION, make_operands(70, 128, 200, "bfloat16"))


def test_unsupported_operands_are_refused():
    x, weight, targets, *_ = make_operands(8, 128, 200, "float16")
    with interpreted("gpu"):
        with pytest.raises(NotImplementedError, match="x has dtype float16; float32 and bfloat16"):
            cross_entropy(x, weight, targets, implementation=IMPLEMENTATION)
        x, weight, targets, *_ = make_operands(8, 96, 200, "bfloat16")
        with pytest.raises(NotImplementedError, match="D=96 of x is not a multiple of 64"):
            cross_entropy(x, weight, targets, implementation=IMPLEMENTATION)
