"""Attention to parts of the keys, joined: output and gradients of the whole, for every form."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpreted, mla_attention
from pallas_kernels.mla.parts import attention_part, attention_part_gradients, join_parts
from tests.kernels.mla_cases import segment_ids
from tests.tolerances import assert_close

HEADS, SCALE = 1, 0.08


def joined(q, k, v, d_output, ids, sizes, implementation):
    """Queries are the last of the keys; returns output and gradients from parts of these sizes."""
    edges = np.cumsum([0, *sizes])
    offset = k.shape[1] - q.shape[1]
    q_ids = None if ids is None else ids[:, offset:]
    parts = []
    for start, stop in itertools.pairwise(edges):
        kv_ids = None if ids is None else ids[:, start:stop]
        options = {"segment_ids": q_ids, "kv_segment_ids": kv_ids, "q_offset": offset - start}
        options |= {"scale": SCALE, "implementation": implementation}
        parts.append(((k[:, start:stop], v[:, start:stop]), options))
    found = [attention_part(q, *part, **options) for part, options in parts]
    output, log_sum = found[0]
    for other in found[1:]:
        output, log_sum = join_parts(output, log_sum, *other)
    gradients = [
        attention_part_gradients(q, *part, output, log_sum, d_output, **options)
        for part, options in parts
    ]
    d_q, d_k, d_v = zip(*gradients)
    return output, sum(d_q), jnp.concatenate(d_k, 1), jnp.concatenate(d_v, 1)


def check(
    implementation, *, queries, sizes, packed, dtype="float32", mode=None, batch=2,
    widths=(192, 128),
):  # fmt: skip
    random, keys = np.random.default_rng(0), sum(sizes)
    key, value = widths
    q, k, v, d_output = (
        jnp.asarray(random.standard_normal((batch, tokens, HEADS, width)), dtype)
        for tokens, width in ((queries, key), (keys, key), (keys, value), (queries, value))
    )
    ids = jnp.asarray(segment_ids(batch, keys)) if packed else None

    def whole(q, k, v):
        return mla_attention(
            q, k, v, scale=SCALE, q_offset=keys - queries, implementation="reference",
            segment_ids=None if ids is None else ids[:, keys - queries :], kv_segment_ids=ids,
            output_dtype=jnp.float32,
        )  # fmt: skip

    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    wanted, back = jax.vjp(jax.jit(whole), *wide)
    wanted = (wanted, *back(d_output.astype(jnp.float32)))
    run = jax.jit(joined, static_argnums=(5, 6))
    with interpreted(mode) if mode else contextlib.nullcontext():
        found = run(q, k, v, d_output, ids, sizes, implementation)
    assert found[0].dtype == jnp.float32
    for name, got, expected in zip(("output", "q", "k", "v"), found, wanted, strict=True):
        assert_close(got, expected, dtype, gradient=name != "output", name=name)


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("reference", marks=pytest.mark.slow)]
)
def test_parts_are_joined_to_the_whole(implementation):
    """Some queries see nothing of one part, padding nothing of any."""
    check(implementation, queries=21, sizes=(17, 13), packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_the_tpu_kernels_are_joined_to_the_whole(packed):
    check("mosaic_tpu", queries=150, sizes=(130, 120), packed=packed, mode="tpu")


@pytest.mark.slow
def test_parts_of_the_hopper_kernels_are_joined_to_the_whole():
    check(
        "mosaic_gpu", queries=70, sizes=(80, 60), packed=True, mode="gpu", dtype="bfloat16",
        batch=1, widths=(64, 64),
    )  # fmt: skip
