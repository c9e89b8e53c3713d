"""Operands of `mla_attention` and `mla_decode` with what must not be read, and their comparison."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import interpreted, mla_attention, mla_decode
from tests.kernels.compare import assert_kernel_as_definition
from tests.kernels.errors import assert_within


def segment_ids(batch: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Ascending segments with a border at a tile's edge, and padding on both sides."""
    cuts = np.random.default_rng(seed).integers(1, tokens, size=(batch, 3))
    cuts[0, 0] = min(128, tokens - 1)
    ids = 1 + (np.arange(tokens)[None, :, None] >= cuts[:, None]).sum(-1)
    ids[:, :3] = 0
    ids[-1, -(tokens // 9) :] = 0
    return ids.astype(np.int32)


def assert_attention(
    mode, queries, *, keys=None, batch=2, heads=2, widths=(192, 128), dtype="float32",
    packed=False, output_dtype=None, **options,
):  # fmt: skip
    """Assert that output, maximum and gradients are those of the definition.

    Args:
        mode: of `interpreted`.
        queries: T.
        keys: S; None takes T.
        batch: B.
        heads: H.
        widths: K and V.
        dtype: of the operands.
        packed: with segments and padding, which holds NaN.
        output_dtype: as in `mla_attention`.
        **options: others of `mla_attention`.
    """
    keys = keys or queries
    draw = np.random.default_rng(queries).normal
    shapes = ((queries, widths[0]), (keys, widths[0]), (keys, widths[1]), (queries, widths[1]))
    q, k, v, cotangent = (
        jnp.asarray(draw(size=(batch, tokens, heads, width)), dtype) for tokens, width in shapes
    )
    spoil = None
    if packed:
        kv_ids = segment_ids(batch, keys)
        ids = kv_ids[:, keys - queries :]
        options |= {"segment_ids": ids, "kv_segment_ids": kv_ids}

        def spoil(operands, cotangents):
            def poison(x, ids):
                return jnp.where((ids == 0)[:, :, None, None], jnp.nan, x)

            q, k, v = operands
            spoiled = (poison(q, ids), poison(k, kv_ids), poison(v, kv_ids))
            return spoiled, (poison(cotangents[0], ids), *cotangents[1:])

    def attend(implementation, *operands):
        exact = operands[0].dtype == jnp.float64
        return mla_attention(
            *operands,
            scale=widths[0] ** -0.5,
            return_max=True,
            output_dtype=None if exact else output_dtype,
            implementation=implementation,
            **options,
        )

    cotangents = (cotangent, jnp.zeros((batch, heads), jnp.float32))
    if output_dtype is None:
        return assert_kernel_as_definition(mode, attend, (q, k, v), cotangents, spoil=spoil)
    with interpreted(mode):
        actual = attend("mosaic_" + mode.split("_")[0], q, k, v)
    assert actual[0].dtype == output_dtype
    exact = attend("reference", *(x.astype(jnp.float32) for x in (q, k, v)))
    # Weights are rounded to bfloat16, the output is not.
    assert_within(actual[0], exact[0], 2.5e-3 if dtype == "bfloat16" else dtype, "output")
    return actual


def assert_decode(
    mode, *, queries=1, heads=6, values=64, extra=32, page_size=16, dtype="float32", ignored=0
):
    """Assert that output and log-sum are those of the definition, for rows of many lengths."""
    max_pages = 5
    lengths = np.array([max_pages * page_size, 1, 2 * page_size + 3, 0, page_size], np.int32)
    batch, num_pages = len(lengths), len(lengths) * max_pages + 2
    rng = np.random.default_rng(heads)
    q = jnp.asarray(rng.normal(size=(batch, queries, heads, values + extra)), dtype)
    pages = rng.normal(size=(num_pages, page_size, values + extra + ignored))
    pages = jnp.asarray(pages, dtype)
    table = rng.permutation(num_pages)[: batch * max_pages].reshape(batch, max_pages)
    written = np.zeros((num_pages, page_size), bool)
    for row, length in enumerate(lengths):
        used = -(-length // page_size)
        for place in range(used):
            written[table[row, place]] = np.arange(page_size) < length - place * page_size
        table[row, used:] = 10**6
    spoiled = jnp.where(written[:, :, None], pages, jnp.nan)
    run = jax.jit(
        functools.partial(
            mla_decode,
            block_table=jnp.asarray(table),
            lengths=jnp.asarray(lengths),
            scale=0.2,
            value_width=values,
            return_log_sum=True,
        ),
        static_argnames="implementation",
    )
    if mode is None:
        output, log_sum = run(q, spoiled, implementation="xla")
    else:
        with interpreted(mode):
            output, log_sum = run(q, spoiled, implementation="mosaic_" + mode.split("_")[0])
    with jax.enable_x64(True):
        exact = run(
            *(jnp.asarray(np.asarray(x, np.float64)) for x in (q, pages)),
            implementation="reference",
        )
    assert output.dtype == q.dtype
    assert_within(output, exact[0], dtype, "output")
    sees = np.isfinite(np.asarray(exact[1]))
    np.testing.assert_array_equal(np.isneginf(log_sum), ~sees)
    assert_within(np.asarray(log_sum)[sees], np.asarray(exact[1])[sees], "float32", "log_sum")
    assert not np.any(np.asarray(output)[~sees])
