"""The depth mixture: 8 blocks and the current sum, one whole pass over them in each direction."""

import functools

import jax
import jax.numpy as jnp

import pallas_kernels
from experiments.kernel_cases.case import KernelCase
from pallas_kernels.attention_residual import mosaic_gpu, mosaic_tpu

_K3 = (8, 1, 8192, 7168)  # N, B, T, D
_SMALL = (4, 2, 300, 256)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _arrays(shape, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    return (
        jax.random.normal(keys[0], shape, dtype),
        jax.random.normal(keys[1], shape[1:], dtype),
        jax.random.normal(keys[2], shape[-1:]) / shape[-1] ** 0.5,
        jax.random.normal(keys[3], shape[1:], dtype),
    )


def _mix(implementation, bank, current, query):
    return pallas_kernels.attention_residual(
        bank, current, query, bank.shape[0], eps=1e-5, implementation=implementation
    )


def _forward(implementation):
    return lambda bank, current, query, _: _mix(implementation, bank, current, query)[0]


def _forward_and_backward(implementation):
    def run(bank, current, query, d_mixed):
        mixed, transpose = jax.vjp(
            lambda *operands: _mix(implementation, *operands)[0], bank, current, query
        )
        return mixed, transpose(d_mixed)

    return run


def _naive(bank, current, query):
    rows = jnp.concatenate([bank, current[None]]).astype(jnp.float32)
    inverse_norm = jax.lax.rsqrt(jnp.mean(rows * rows, axis=-1) + 1e-5)
    scores = jnp.einsum("nbtd,d->nbt", rows, query, precision="highest") * inverse_norm
    return jnp.einsum("nbt,nbtd->btd", jax.nn.softmax(scores, axis=0), rows).astype(current.dtype)


def _naive_and_backward(bank, current, query, d_mixed):
    mixed, transpose = jax.vjp(_naive, bank, current, query)
    return mixed, transpose(d_mixed)


def _cases(size, shape, dtype):
    make_inputs = functools.partial(_arrays, shape, dtype)
    row_bytes = jnp.dtype(dtype).itemsize * shape[1] * shape[2] * shape[3]
    elements, rows = shape[1] * shape[2] * shape[3], shape[0] + 1
    candidates = {}
    if size == "k3":
        candidates = {
            "attention_residual_tpu": tuple(
                mosaic_tpu.Tiles(forward_tokens=forward, backward_tokens=backward)
                for forward, backward in ((64, 32), (128, 64), (256, 128))
            ),
            "attention_residual_gpu": tuple(
                mosaic_gpu.GPUTiles(
                    forward_tokens=forward, forward_stages=stages, backward_tokens=backward
                )
                for forward, stages, backward in ((4, 3, 32), (8, 2, 64), (8, 3, 64), (16, 4, 64))
            ),
        }
    suffix = "" if dtype == jnp.bfloat16 else " float32"
    return [
        KernelCase(
            op="attention_residual",
            name=f"forward{suffix}",
            size=size,
            make_inputs=make_inputs,
            function=_forward,
            flops=6 * rows * elements,
            bytes=(rows + 1) * row_bytes,
            baselines={"naive": lambda bank, current, query, _: _naive(bank, current, query)},
            candidates=candidates,
        ),
        KernelCase(
            op="attention_residual",
            name=f"forward+backward{suffix}",
            size=size,
            make_inputs=make_inputs,
            function=_forward_and_backward,
            flops=18 * rows * elements,
            # Forward: rows in, mixture out. Backward: rows and its gradient in, gradients out.
            bytes=(3 * rows + 2) * row_bytes,
            baselines={"naive": _naive_and_backward},
            candidates=candidates,
        ),
    ]


# --- two phases ----------------------------------------------------------------------------------

_K3_BLOCK = (8, 1, 1024, 7168)  # tokens of a prefill step or of a pipeline's micro-batch
_QUERIES = 24  # two mixtures in each of the 12 layers that share a bank


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _phase_arrays(shape, num_queries, dtype):
    bank, current, query, _ = _arrays(shape, dtype)
    queries = query * jnp.linspace(-1, 1, num_queries)[:, None]
    weighted = jnp.broadcast_to(bank[0].astype(jnp.float32), (num_queries, *shape[1:]))
    return bank, queries, weighted, current


def _block(implementation):
    def run(bank, queries, weighted, current):
        del weighted, current
        return pallas_kernels.attention_residual_block(
            bank, queries, bank.shape[0], eps=1e-5, implementation=implementation
        )

    return run


def _merge(implementation):
    def run(bank, queries, weighted, current):
        del bank
        ones = jnp.ones(weighted.shape[:-1])
        return pallas_kernels.attention_residual_merge(
            pallas_kernels.DepthPartial(weighted, ones, ones),
            current, queries[1], index=1, eps=1e-5, implementation=implementation,
        )  # fmt: skip

    return run


def _phase_cases(size, shape, num_queries, dtype):
    make_inputs = functools.partial(_phase_arrays, shape, num_queries, dtype)
    elements, item = shape[1] * shape[2] * shape[3], jnp.dtype(dtype).itemsize
    return [
        KernelCase(
            op="attention_residual_block",
            name=f"{num_queries} queries",
            size=size,
            make_inputs=make_inputs,
            function=_block,
            flops=(2 + 4 * num_queries) * shape[0] * elements,
            bytes=(shape[0] * item + 4 * num_queries) * elements,
        ),
        KernelCase(
            op="attention_residual_merge",
            name="one query",
            size=size,
            make_inputs=make_inputs,
            function=_merge,
            flops=7 * elements,
            bytes=(2 * item + 4) * elements,
        ),
    ]


CASES = [
    *_cases("k3", _K3, jnp.bfloat16),
    *_cases("k3", _K3, jnp.float32),
    *_cases("small", _SMALL, jnp.bfloat16),
    *_cases("small", _SMALL, jnp.float32),
    *_phase_cases("k3", _K3_BLOCK, _QUERIES, jnp.bfloat16),
    *_phase_cases("small", _SMALL, 3, jnp.float32),
]
