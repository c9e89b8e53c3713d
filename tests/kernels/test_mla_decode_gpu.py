"""The Hopper kernel of `mla_decode`, interpreted, against the float64 definition."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import interpreted, mla_decode
from pallas_kernels.mla.decode_gpu import DecodeTiles
from pallas_kernels.tiles import with_tiles
from tests.kernels.errors import assert_within
from tests.kernels.mla_cases import assert_decode

NARROW = {"values": 128, "extra": 64, "dtype": "bfloat16"}


def random_operands(queries, heads, lengths, *, page_size=64, max_pages=4, width=192):
    """Queries, pages, a table in scrambled order and lengths."""
    keys = jax.random.split(jax.random.key(queries), 3)
    table = jax.random.permutation(keys[0], len(lengths) * max_pages)
    return (
        jax.random.normal(keys[1], (len(lengths), queries, heads, width), jnp.bfloat16),
        jax.random.normal(keys[2], (table.size, page_size, width), jnp.bfloat16),
        table.reshape(len(lengths), max_pages),
        jnp.asarray(lengths, jnp.int32),
    )


def assert_as_definition(mode, operands, *, value_width=128, spans=1, **options):
    """Compare with the definition in float64, the cache in so many spans."""

    def decode(implementation, *operands):
        return mla_decode(
            *operands, scale=0.1, value_width=value_width, implementation=implementation, **options
        )

    rows = operands[0].shape[0] * -(-operands[0].shape[1] * operands[0].shape[2] // 64)
    with interpreted(mode), with_tiles(mla_decode_gpu=DecodeTiles(programs=rows * spans)):
        actual = jax.jit(functools.partial(decode, "mosaic_gpu"))(*operands)
    with jax.enable_x64(True):
        exact = decode("reference", *(x.astype(jnp.float64) for x in operands[:2]), *operands[2:])
    assert_within(actual, exact, "bfloat16", "output")
    return actual


def test_decode_of_a_scrambled_table_is_right():
    assert_as_definition("gpu", random_operands(2, 3, [70], max_pages=2))


@pytest.mark.slow
def test_decode_reads_no_garbage():
    """NaN past every length and entries of the table that are no pages; one row is empty."""
    assert_decode("gpu", queries=2, heads=3, page_size=8, **NARROW)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [32, 128])
def test_decode_of_other_pages_is_right(page_size):
    assert_as_definition("gpu", random_operands(1, 3, [100], page_size=page_size, max_pages=4))


@pytest.mark.slow
def test_decode_in_spans_of_causal_queries_is_right():
    """The last queries see into the next tile, and rows fill more than one block."""
    operands = random_operands(5, 14, [67, 1, 190], max_pages=3)
    assert_as_definition("gpu", operands, spans=2)


@pytest.mark.slow
def test_decode_of_all_channels_is_right():
    operands = random_operands(1, 12, [130], max_pages=3, width=576)
    actual = assert_as_definition(
        "gpu", operands, value_width=512, spans=2, output_dtype=jnp.float32
    )
    assert actual.dtype == jnp.float32


@pytest.mark.slow
def test_decode_does_not_race():
    assert_as_definition("gpu_races", random_operands(2, 3, [150], max_pages=3))


def test_refusals_name_the_argument():
    table, lengths = jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32)

    def decode(width=576, page_size=64, value_width=512, dtype=jnp.bfloat16):
        mla_decode(
            jnp.ones((1, 1, 2, width), dtype), jnp.ones((4, page_size, width), dtype), table,
            lengths, scale=1.0, value_width=value_width, implementation="mosaic_gpu",
        )  # fmt: skip

    with interpreted("gpu"):
        with pytest.raises(NotImplementedError, match="q_latent is float32 and pages are float32"):
            decode(dtype=jnp.float32)
        with pytest.raises(NotImplementedError, match="page_size=12 is neither 8, 16 or 32 nor"):
            decode(page_size=12)
        with pytest.raises(NotImplementedError, match="q_latent has 640 channels; expected"):
            decode(width=640)
        with pytest.raises(NotImplementedError, match="value_width=64 is not a multiple of 128"):
            decode(value_width=64)
