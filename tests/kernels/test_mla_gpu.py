"""The Hopper kernels of `mla_attention`, interpreted, against the definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpreted, mla_attention
from tests.kernels.mla_cases import assert_attention

ONE = {"batch": 1, "heads": 1, "dtype": "bfloat16"}


def test_attention_is_right():
    assert_attention("gpu", 128, **ONE, widths=(64, 64))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gpu", "gpu_races"])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_of_unequal_widths_is_right(mode, packed):
    """Two blocks of queries, the second one not full, and both loops over tiles."""
    assert_attention(mode, 200, **ONE, packed=packed)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_several_rows_and_heads_is_right(causal):
    assert_attention("gpu", 130, heads=2, widths=(128, 128), dtype="bfloat16", causal=causal,
                     packed=True)  # fmt: skip


@pytest.mark.slow
def test_attention_to_a_cache_is_right():
    offsets = np.array([70, -2])
    assert_attention("gpu", 100, keys=180, heads=1, widths=(64, 128), dtype="bfloat16",
                     q_offset=offsets)  # fmt: skip


@pytest.mark.slow
def test_attention_with_float32_output_is_right():
    assert_attention("gpu", 128, **ONE, output_dtype=jnp.float32)


def test_refusals_name_the_argument():
    q = jnp.ones((1, 128, 1, 192))
    with interpreted("gpu"):
        with pytest.raises(NotImplementedError, match="q, k, v are float32, float32"):
            mla_attention(q, q, q[..., :128], scale=1.0, implementation="mosaic_gpu")
        q = jnp.ones((1, 128, 1, 80), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match=r"K=80, V=80 are not in \(64, 128, 192\)"):
            mla_attention(q, q, q, scale=1.0, implementation="mosaic_gpu")
