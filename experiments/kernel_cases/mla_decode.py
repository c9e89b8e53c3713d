"""Calls of `mla_decode`: one and four query tokens over pages of latents, 512 + 64 channels.

Pages hold 640 channels, whole vectors of a TPU, but for one case with 576.
"""

import functools

import jax
import jax.numpy as jnp

from experiments.kernel_cases.case import KernelCase
from pallas_kernels import mla_decode
from pallas_kernels.mla import decode_gpu, decode_tpu

_VALUES, _EXTRA = 512, 64


def _inputs(rows, queries, heads, tokens, page_size, dtype, channels):
    @jax.jit
    def draw():
        keys = jax.random.split(jax.random.key(0), 3)
        num_pages = rows * tokens // page_size
        table = jax.random.permutation(keys[0], num_pages).reshape(rows, -1)
        return (
            jax.random.normal(keys[1], (rows, queries, heads, _VALUES + _EXTRA), dtype),
            jax.random.normal(keys[2], (num_pages, page_size, channels), dtype),
            table.astype(jnp.int32),
            jnp.full((rows,), tokens, jnp.int32),
        )

    return draw()


def _decode(implementation):
    def run(q_latent, pages, block_table, lengths):
        return mla_decode(
            q_latent, pages, block_table, lengths, scale=192**-0.5, implementation=implementation
        )

    return run


def _case(name, size, rows, queries, heads, tokens, page_size, dtype="bfloat16", channels=640):
    itemsize = jnp.dtype(dtype).itemsize
    width = _VALUES + _EXTRA
    pairs = rows * queries * heads * tokens
    moved = rows * tokens * channels + rows * queries * heads * (width + _VALUES)
    return KernelCase(
        op="mla_decode",
        name=name,
        size=size,
        make_inputs=functools.partial(
            _inputs, rows, queries, heads, tokens, page_size, jnp.dtype(dtype), channels
        ),
        function=_decode,
        implementations=("xla", "mosaic_tpu", *(["mosaic_gpu"] if dtype == "bfloat16" else [])),
        flops=2.0 * pairs * (width + _VALUES),
        bytes=float(moved * itemsize),
        candidates={
            "mla_decode_tpu": tuple(
                decode_tpu.DecodeTiles(tokens=n) for n in (256, 512, 1024, 2048)
            ),
            # Shared memory holds the queries and two tiles, no more.
            "mla_decode_gpu": tuple(decode_gpu.DecodeTiles(programs=n) for n in (66, 132, 264)),
        },
    )


CASES = [
    _case("bf16 64 rows 32k tokens 96 heads", "k3", 64, 1, 96, 32768, 64),
    _case("bf16 64 rows 32k tokens 96 heads pages of 256", "k3", 64, 1, 96, 32768, 256),
    _case("bf16 64 rows 32k tokens 12 heads", "k3", 64, 1, 12, 32768, 64),
    _case("bf16 64 rows 32k tokens 12 heads 4 queries", "k3", 64, 4, 12, 32768, 64),
    _case("bf16 64 rows 32k tokens 96 heads pages of 576 channels", "k3", 64, 1, 96, 32768, 64,
          channels=576),
    _case("bf16", "small", 4, 1, 12, 512, 64),
    _case("float32", "small", 4, 2, 12, 512, 64, "float32"),
]  # fmt: skip
