"""Cross entropy of the output head: the whole vocabulary, and an eighth of it as sharded by 8."""

import functools

import jax
import jax.numpy as jnp

from experiments.kernel_cases.case import KernelCase
from pallas_kernels import cross_entropy
from pallas_kernels.cross_entropy.mosaic_gpu import CrossEntropyGPUTiles
from pallas_kernels.cross_entropy.mosaic_tpu import CrossEntropyTiles

_FORWARD, _GRADIENT = "forward", "forward+backward"


def _inputs(tokens: int, width: int, vocabulary: int, dtype) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (tokens, width), dtype),
        jax.random.normal(keys[1], (width, vocabulary), dtype) * width**-0.5,
        jax.random.randint(keys[2], (tokens,), 0, vocabulary, jnp.int32),
    )


def _of(implementation: str):
    return functools.partial(cross_entropy, implementation=implementation)


def _plain(x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """All logits in memory, differentiated by jax."""
    logits = jnp.matmul(x, weight, preferred_element_type=jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def _gradient(form, x: jax.Array, weight: jax.Array, targets: jax.Array):
    loss = lambda x, weight: form(x, weight, targets).mean()  # noqa: E731
    return jax.value_and_grad(loss, argnums=(0, 1))(x, weight)


def _case(
    name: str, size: str, tokens: int, width: int, vocabulary: int, dtype: str, which: str
) -> KernelCase:
    operands = (tokens + vocabulary) * width * jnp.dtype(dtype).itemsize
    product = 2.0 * tokens * width * vocabulary
    if which == _FORWARD:
        function, plain, flops, moved = _of, _plain, product, operands + 8 * tokens
    else:
        function = lambda implementation: functools.partial(_gradient, _of(implementation))  # noqa: E731
        plain, flops, moved = functools.partial(_gradient, _plain), 3 * product, 2 * operands
    return KernelCase(
        op="cross_entropy",
        name=f"{which} {name} {dtype}",
        size=size,
        make_inputs=functools.partial(_inputs, tokens, width, vocabulary, jnp.dtype(dtype)),
        function=function,
        flops=flops,
        bytes=moved,
        baselines={"plain": plain},
        candidates={
            "cross_entropy_forward_tpu": (
                CrossEntropyTiles(),
                CrossEntropyTiles(tokens=1024),
                CrossEntropyTiles(vocabulary=1024),
                CrossEntropyTiles(width=1024),
            ),
            "cross_entropy_d_logits_tpu": (
                CrossEntropyTiles(),
                CrossEntropyTiles(tokens=1024),
                CrossEntropyTiles(width=1024),
                CrossEntropyTiles(chunk=1 << 25),
            ),
            "cross_entropy_gpu": (
                CrossEntropyGPUTiles(),
                CrossEntropyGPUTiles(stages=3),
                CrossEntropyGPUTiles(chunk=1 << 25),
            ),
        },
    )


CASES = [
    _case(name, "k3", 8192, 7168, vocabulary, "bfloat16", which)
    for name, vocabulary in (("W 163840", 163840), ("W 163840/8", 163840 // 8))
    for which in (_FORWARD, _GRADIENT)
] + [
    _case("W 8192", "small", 2048, 256, 8192, dtype, which)
    for dtype in ("float32", "bfloat16")
    for which in (_FORWARD, _GRADIENT)
]
