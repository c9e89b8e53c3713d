"""The TPU kernels of `short_conv`, interpreted, against the float64 definition."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import choices_made, interpreted, short_conv
from pallas_kernels.short_conv.mosaic_tpu import Tiles
from pallas_kernels.tiles import with_tiles
from pallas_kernels.traffic import count_traffic
from tests.kernels.short_conv_cases import (
    TAPS,
    assert_as_definition,
    ids_with_holes,
    make_operands,
    packed_ids,
)

SMALL = Tiles(forward_tokens=128, forward_heads=8, backward_tokens=128, backward_heads=8)


def small_tiles():
    return with_tiles(short_conv_tpu=SMALL)


def test_padding_anywhere_and_several_tiles_are_right():
    with small_tiles():
        assert_as_definition("tpu", *make_operands(1, 140, 2), ids_with_holes(1, 140))


@pytest.mark.slow
@pytest.mark.parametrize("ids", [None, packed_ids, ids_with_holes])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_segments_and_states_are_right(ids, with_state, dtype):
    operands = make_operands(2, 300, 9, dtype, with_state=with_state)
    with small_tiles():
        assert_as_definition("tpu", *operands, None if ids is None else ids(2, 300))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 128, 129, 131, 256])
def test_every_length_is_right(length):
    with small_tiles():
        assert_as_definition("tpu", *make_operands(1, length, 1), None)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tpu_poisoned", "tpu_races"])
def test_nothing_unwritten_is_read_and_two_cores_do_not_race(mode):
    with small_tiles():
        assert_as_definition(mode, *make_operands(2, 130, 1), ids_with_holes(2, 130))


@pytest.mark.parametrize("ids", [None, pytest.param(packed_ids, marks=pytest.mark.slow)])
def test_traffic_is_as_estimated(ids):
    (x, weight, state), (d_output, _) = make_operands(2, 300, 16, "bfloat16")
    ids = None if ids is None else ids(2, 300)

    def run(*operands):
        def convolve(x, weight, state):
            return short_conv(
                x, weight, segment_ids=ids, initial_state=state, implementation="mosaic_tpu"
            )[0]

        return jax.vjp(convolve, *operands)[1](d_output)

    with interpreted("tpu"), small_tiles():
        calls = count_traffic(run, x, weight, state)
    assert [call.bytes for call in calls] == [c.cost_estimate.bytes_accessed for c in calls]
    # Beside x, its output and the gradients: weights, windows, kinds of tokens, sums.
    for call, arrays in zip(calls, (2, 3), strict=True):
        assert (
            arrays * x.nbytes < call.bytes < 1.1 * arrays * x.nbytes + 2 * 4 * TAPS * 16 * 128 * 4
        )


def test_unsupported_operands_are_refused_or_left_to_xla():
    x, weight = jnp.zeros((1, 4, 2, 64)), jnp.zeros((TAPS, 2, 64))
    with interpreted("tpu"):
        with pytest.raises(NotImplementedError, match="K=64 is not a multiple of 128"):
            short_conv(x, weight, implementation="mosaic_tpu")
        short_conv(x, weight)
    assert choices_made()[-1].implementation == "xla"
