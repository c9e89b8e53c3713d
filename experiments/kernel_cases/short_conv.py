"""The short convolution of one of q, k, v on all heads of K3, and of the three at once."""

import functools

import jax
import jax.numpy as jnp

import pallas_kernels
from experiments.kernel_cases.case import KernelCase
from pallas_kernels.short_conv import mosaic_gpu, mosaic_tpu

_K3 = (1, 8192, 96, 128)  # B, T, H, K
_SMALL = (2, 300, 3, 128)
_TAPS = 4


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _arrays(shape, dtype, packed):
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = (
        jax.random.normal(keys[0], shape, dtype),
        jax.random.normal(keys[1], (_TAPS, *shape[2:])),
        jax.random.normal(keys[2], shape, dtype),
    )
    if not packed:
        return arrays
    # Documents of unequal lengths, and padding at the end of the row.
    batch, length = shape[:2]
    ids = 1 + 5 * jnp.arange(length) // length + (jnp.arange(length) > length // 7)
    ids = jnp.where(jnp.arange(length) < length * 31 // 32, ids, 0)
    return (*arrays, jnp.broadcast_to(ids, (batch, length)))


def _convolve(implementation, x, weight, ids):
    return pallas_kernels.short_conv(x, weight, segment_ids=ids, implementation=implementation)[0]


def _forward(implementation):
    return lambda x, weight, _, ids=None: _convolve(implementation, x, weight, ids)


def _forward_and_backward(implementation):
    def run(x, weight, d_output, ids=None):
        output, transpose = jax.vjp(lambda x, w: _convolve(implementation, x, w, ids), x, weight)
        return output, transpose(d_output)

    return run


def _library(x, weight, _=None, ids=None):
    """XLA's own depthwise convolution, of rows that are one segment."""
    del ids
    batch, length, heads, width = x.shape
    total = jax.lax.conv_general_dilated(
        x.reshape(batch, length, -1).astype(jnp.float32),
        weight.reshape(_TAPS, 1, -1),
        window_strides=(1,),
        padding=((_TAPS - 1, 0),),
        dimension_numbers=("NTC", "TIO", "NTC"),
        feature_group_count=heads * width,
    )
    return jax.nn.silu(total).astype(x.dtype).reshape(x.shape)


def _cases(size, shape, dtype, *, packed=False, label=""):
    make_inputs = functools.partial(_arrays, shape, dtype, packed)
    num = shape[0] * shape[1] * shape[2] * shape[3]
    bytes_of_x = num * jnp.dtype(dtype).itemsize
    label += "" if dtype == jnp.bfloat16 else " float32"
    candidates = {}
    if size == "k3":
        candidates = {
            "short_conv_tpu": tuple(
                mosaic_tpu.Tiles(
                    forward_tokens=tokens, forward_heads=heads,
                    backward_tokens=tokens, backward_heads=heads,
                )
                for tokens, heads in ((128, 16), (256, 16), (512, 16), (128, 32), (256, 32))
            ),
            "short_conv_gpu": tuple(
                mosaic_gpu.GPUTiles(
                    forward_tokens=tokens, forward_heads=heads,
                    backward_tokens=tokens, backward_heads=max(heads // 2, 1),
                )
                for tokens, heads in ((32, 4), (64, 2), (64, 4), (128, 2))
            ),
        }  # fmt: skip
    common = {
        "op": "short_conv",
        "size": size,
        "make_inputs": make_inputs,
        "candidates": candidates,
    }
    return [
        KernelCase(
            name=f"forward{label}",
            function=_forward,
            flops=(2 * _TAPS + 3) * num,
            bytes=2 * bytes_of_x,
            baselines={} if packed else {"lax.conv": _library},
            **common,
        ),
        KernelCase(
            name=f"forward+backward{label}",
            function=_forward_and_backward,
            flops=(8 * _TAPS + 11) * num,
            bytes=5 * bytes_of_x,  # forward: x, output; backward: x and two gradients
            **common,
        ),
    ]


CASES = [
    *_cases("k3", _K3, jnp.bfloat16),
    *_cases("k3", _K3, jnp.bfloat16, packed=True, label=" packed"),
    *_cases("k3", (*_K3[:2], 3 * _K3[2], _K3[3]), jnp.bfloat16, label=" q, k, v"),
    *_cases("k3", _K3, jnp.float32),
    *_cases("small", _SMALL, jnp.bfloat16, packed=True, label=" packed"),
    *_cases("small", _SMALL, jnp.float32),
]
