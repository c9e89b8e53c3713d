"""Calls of `mla_attention`: causal attention with keys of 192 channels and values of 128."""

import functools
import itertools

import jax
import jax.numpy as jnp

from experiments.kernel_cases.case import KernelCase
from pallas_kernels import mla_attention
from pallas_kernels.mla.mosaic_tpu_plan import AttentionTiles as TpuTiles

_TPU_TILES = tuple(
    TpuTiles(queries=queries, keys=keys)
    for queries, keys in itertools.product((256, 512, 1024), (256, 512, 1024))
)
_CANDIDATES = {
    "mla_attention_forward_tpu": _TPU_TILES,
    "mla_attention_key_gradients_tpu": _TPU_TILES,
    "mla_attention_query_gradients_tpu": _TPU_TILES,
}


def _inputs(tokens, heads, key_width, value_width, dtype, segments):
    @jax.jit
    def draw():
        keys = jax.random.split(jax.random.key(0), 4)
        widths = (key_width, key_width, value_width, value_width)
        arrays = [
            jax.random.normal(key, (1, tokens, heads, width), dtype)
            for key, width in zip(keys, widths, strict=True)
        ]
        if segments == 1:
            return tuple(arrays)
        ids = 1 + jnp.arange(tokens, dtype=jnp.int32) * segments // tokens
        return (*arrays, ids[None])

    return draw()


def _forward(implementation, key_width):
    def run(q, k, v, _, segment_ids=None):
        return mla_attention(
            q, k, v, scale=key_width**-0.5, segment_ids=segment_ids, implementation=implementation
        )

    return run


def _both(implementation, key_width):
    def run(q, k, v, d_output, segment_ids=None):
        forward = functools.partial(_forward(implementation, key_width), segment_ids=segment_ids)
        output, transpose = jax.vjp(lambda *x: forward(*x, None), q, k, v)
        return output, *transpose(d_output)

    return run


def _case(name, size, tokens, heads, *, widths=(192, 128), dtype="bfloat16", segments=1, **more):
    key_width, value_width = widths
    backward = name.startswith("forward+backward")
    # Pairs that see each other, and the products of each: 2 forward, 5 backward.
    pairs = segments * (tokens // segments) * (tokens // segments + 1) // 2 * heads
    forward_width = key_width + value_width
    width = forward_width + (3 * key_width + 2 * value_width if backward else 0)
    itemsize = jnp.dtype(dtype).itemsize
    moved = (2 * key_width + 2 * value_width) * (3 if backward else 1)
    return KernelCase(
        op="mla_attention",
        name=name,
        size=size,
        make_inputs=functools.partial(_inputs, tokens, heads, *widths, dtype, segments),
        function=functools.partial(_both if backward else _forward, key_width=key_width),
        flops=2.0 * pairs * width,
        bytes=float(moved * tokens * heads * itemsize),
        candidates=_CANDIDATES,
        **more,
    )


_NO_GPU = ("xla", "mosaic_tpu")

CASES = [
    _case("forward bf16 96 heads", "k3", 8192, 96),
    _case("forward+backward bf16 96 heads", "k3", 8192, 96),
    _case("forward bf16 12 heads", "k3", 8192, 12),
    _case("forward+backward bf16 12 heads", "k3", 8192, 12),
    _case("forward+backward bf16 12 heads 8 segments", "k3", 8192, 12, segments=8),
    _case("forward+backward float32 12 heads", "k3", 8192, 12, dtype="float32",
          implementations=_NO_GPU),
    _case("forward bf16", "small", 512, 2),
    _case("forward+backward bf16", "small", 512, 2),
    _case("forward+backward float32", "small", 512, 2, dtype="float32", implementations=_NO_GPU),
]  # fmt: skip
