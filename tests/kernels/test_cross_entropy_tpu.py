"""The TPU kernels of `cross_entropy`, interpreted, against the float64 definition."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import cross_entropy, interpreted
from pallas_kernels.cross_entropy.mosaic_tpu import CrossEntropyTiles
from pallas_kernels.tiles import with_tiles
from pallas_kernels.traffic import count_traffic
from tests.kernels.cross_entropy_cases import assert_as_definition, make_operands, run

IMPLEMENTATION = "mosaic_tpu"
# Several tiles in each dimension at small sizes, and several chunks of the vocabulary.
SMALL = CrossEntropyTiles(tokens=64, vocabulary=256, width=128, chunk=1 << 16)


def small_tiles(tiles=SMALL):
    return with_tiles(cross_entropy_forward_tpu=tiles, cross_entropy_d_logits_tpu=tiles)


def test_odd_sizes_are_right():
    with interpreted("tpu_poisoned"), small_tiles():
        assert_as_definition(IMPLEMENTATION, make_operands(70, 256, 400))


def test_large_bfloat16_logits_are_right():
    with interpreted("tpu"), small_tiles():
        assert_as_definition(IMPLEMENTATION, make_operands(70, 128, 300, "bfloat16", scale=1e4))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 128, 128), (64, 384, 1000), (300, 512, 513)])
def test_all_sizes_are_right(shape, dtype):
    operands = make_operands(*shape, dtype)
    with interpreted("tpu"):
        assert_as_definition(IMPLEMENTATION, operands)
        with small_tiles():
            assert_as_definition(IMPLEMENTATION, operands)


@pytest.mark.slow
def test_two_cores_do_not_race():
    with interpreted("tpu_races"), small_tiles():
        assert_as_definition(IMPLEMENTATION, make_operands(140, 256, 300))


@pytest.mark.parametrize(
    "tiles", [SMALL, CrossEntropyTiles(tokens=64, vocabulary=256, width=512, chunk=1 << 16)]
)
def test_traffic_is_as_estimated(tiles):
    operands = make_operands(140, 512, 700, "bfloat16")
    with interpreted("tpu"), small_tiles(tiles):
        calls = count_traffic(functools.partial(run, IMPLEMENTATION), operands)
    assert len(calls) == 3  # forward, the chunks of one width, the last chunk
    for call in calls:
        assert call.bytes == call.cost_estimate.bytes_accessed, call
    assert calls[0].cost_estimate.flops == 2 * 140 * 512 * 700
    assert calls[0].cost_estimate.transcendentals == 140 * 700


def test_unsupported_operands_are_refused_or_left_to_xla():
    x, weight, targets, *_ = make_operands(8, 96, 200)
    with interpreted("tpu"):
        with pytest.raises(NotImplementedError, match=r"cross_entropy.* D=96 of x is not a mult"):
            cross_entropy(x, weight, targets, implementation=IMPLEMENTATION)
        x, weight, targets, *_ = make_operands(8, 128, 100)
        with pytest.raises(NotImplementedError, match="W=100 of weight is less than 128"):
            cross_entropy(x, weight, targets, implementation=IMPLEMENTATION)
        with pytest.raises(NotImplementedError, match="x has dtype float16"):
            half = (x.astype(jnp.float16), weight.astype(jnp.float16))
            cross_entropy(*half, targets, implementation=IMPLEMENTATION)
    with pytest.raises(NotImplementedError, match="it runs on tpu"):
        cross_entropy(x, weight, targets, implementation=IMPLEMENTATION)
    assert jax.eval_shape(cross_entropy, x, weight, targets).shape == (8,)
