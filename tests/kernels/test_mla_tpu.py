"""The TPU kernels of `mla_attention` and `mla_decode`, interpreted, against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpreted, mla_attention, mla_decode
from pallas_kernels.mla.decode_tpu import DecodeTiles
from pallas_kernels.mla.mosaic_tpu_plan import AttentionTiles
from pallas_kernels.tiles import with_tiles
from pallas_kernels.traffic import count_traffic
from tests.kernels.mla_cases import assert_attention, assert_decode

# Several tiles and, of float32, a span for each tile.
SMALL = AttentionTiles(queries=128, keys=128, span=256)


def attention_tiles(tiles=SMALL):
    kernels = ("forward", "key_gradients", "query_gradients")
    return with_tiles(**{f"mla_attention_{kernel}_tpu": tiles for kernel in kernels})


def test_packed_attention_is_right():
    with attention_tiles():
        assert_attention("tpu", 200, packed=True)


def test_attention_in_bfloat16_is_right():
    with attention_tiles(AttentionTiles(queries=128, keys=256)):
        assert_attention("tpu", 300, batch=1, widths=(64, 64), dtype="bfloat16")


def test_attention_to_a_cache_ignores_what_lies_behind():
    """Heads of odd widths are padded; the first two queries of row 1 see nothing."""
    with attention_tiles():
        offsets = np.array([60, -2])
        assert_attention("tpu", 130, keys=250, heads=1, widths=(24, 16), q_offset=offsets)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tpu_poisoned", "tpu_races"])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_reads_no_garbage_and_does_not_race(mode, packed):
    with attention_tiles():
        assert_attention(mode, 190, batch=1, packed=packed)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 257, 300])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_all_lengths_is_right(tokens, packed, causal):
    if packed and tokens < 16:
        pytest.skip("too short for segments")
    # Of one query and one key all gradients but that of the value are zero.
    extra = int(tokens == 1)
    with attention_tiles():
        assert_attention(
            "tpu", tokens, keys=tokens + extra, packed=packed, causal=causal, q_offset=extra
        )


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(192, 128), (128, 128), (64, 128), (72, 72)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_of_all_widths_is_right(widths, dtype):
    assert_attention("tpu", 150, widths=widths, dtype=dtype, packed=True)
    assert_attention("tpu", 150, widths=widths, dtype=dtype, heads=3, output_dtype=jnp.float32)


def test_row_without_tokens_has_no_maximum():
    x = jnp.ones((2, 40, 1, 128), jnp.float32)
    ids = np.array([[0] * 40, [0] * 20 + [3] * 20])
    with interpreted("tpu"):
        output, largest = mla_attention(
            x, x, x, scale=1.0, segment_ids=ids, return_max=True, implementation="mosaic_tpu"
        )
    assert not np.any(output[0]) and not np.any(output[1, :20])
    np.testing.assert_allclose(largest, [[-np.inf], [128.0]])


@pytest.mark.parametrize("span", [512, 8192])
@pytest.mark.parametrize("packed", [False, True])
def test_traffic_is_as_estimated(span, packed):
    """Each operand moves once where the other side is held whole, causal spans otherwise."""
    tokens, heads, key_width, value_width = 1100, 4, 192, 128
    q, v = (
        jax.ShapeDtypeStruct((1, tokens, heads, width), jnp.bfloat16)
        for width in (key_width, value_width)
    )
    ids = np.ones((1, tokens), np.int32) if packed else None

    def run(q, k, v):
        def attend(*x):
            return mla_attention(*x, scale=1.0, segment_ids=ids, implementation="mosaic_tpu")

        output, transpose = jax.vjp(attend, q, k, v)
        return transpose(output)

    with interpreted("tpu"), attention_tiles(AttentionTiles(queries=256, keys=256, span=span)):
        calls = count_traffic(run, q, q, v)
    assert len(calls) == 3
    for call in calls:
        if packed and span < tokens:  # segments may skip spans
            assert call.bytes <= call.cost_estimate.bytes_accessed
        else:
            assert call.bytes == call.cost_estimate.bytes_accessed, call.name
    if span > tokens:
        once = 2 * tokens * heads * (2 * key_width + 2 * value_width) + 4 * tokens * heads
        assert calls[0].bytes == once + (4 * 1280 * 3 if packed else 0)


def test_decode_is_right():
    with with_tiles(mla_decode_tpu=DecodeTiles(tokens=32)):
        assert_decode("tpu", queries=2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tpu_poisoned", "tpu_races"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_reads_no_garbage_and_does_not_race(mode, dtype):
    with with_tiles(mla_decode_tpu=DecodeTiles(tokens=32)):
        assert_decode(mode, queries=3, heads=3, dtype=dtype)
        assert_decode(mode, values=512, extra=64, ignored=64, dtype=dtype)


def test_decode_moves_what_is_estimated():
    q = jax.ShapeDtypeStruct((3, 1, 4, 576), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((24, 64, 640), jnp.bfloat16)
    table = np.arange(24).reshape(3, 8)

    def moved(*lengths):
        def run(q, pages, table, lengths):
            return mla_decode(q, pages, table, lengths, scale=1.0, implementation="mosaic_tpu")

        with interpreted("tpu"), with_tiles(mla_decode_tpu=DecodeTiles(tokens=128)):
            (call,) = count_traffic(run, q, pages, table, np.array(lengths))
        return call.bytes, call.cost_estimate.bytes_accessed

    page = 64 * 640 * 2
    full, estimate = moved(512, 512, 512)
    assert full == estimate
    short, _ = moved(512, 130, 512)
    assert short == full - 5 * page


def test_refusals_name_the_argument():
    q = jnp.ones((1, 8, 2, 64), jnp.float16)
    with interpreted("tpu"):
        with pytest.raises(NotImplementedError, match="q, k, v are float16"):
            mla_attention(q, q, q, scale=1.0, implementation="mosaic_tpu")
        with pytest.raises(NotImplementedError, match="page_size=12 is not a multiple of 8"):
            mla_decode(
                jnp.ones((1, 1, 2, 576)), jnp.ones((4, 12, 576)), jnp.zeros((1, 2), jnp.int32),
                jnp.ones(1, jnp.int32), scale=1.0, implementation="mosaic_tpu",
            )  # fmt: skip
    with pytest.raises(NotImplementedError, match="it runs on tpu, and this program is for cpu"):
        mla_attention(*[jnp.ones((1, 8, 2, 64))] * 3, scale=1.0, implementation="mosaic_tpu")
