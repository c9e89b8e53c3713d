"""The transition over one of 8 pieces of a long row, with the 12 heads of one of 8 chips of K3."""

import functools

import jax
import jax.numpy as jnp

import pallas_kernels
from experiments.kernel_cases.case import KernelCase

_WIDTH, _CHUNK = 128, 64


@functools.partial(jax.jit, static_argnums=(0, 1))
def _arrays(shape, dtype):
    keys = jax.random.split(jax.random.key(0), 6)
    k, v, logits = (jax.random.normal(key, (*shape, _WIDTH), dtype) for key in keys[:3])
    beta = jax.random.normal(keys[3], shape, dtype)
    gate = pallas_kernels.KDAGate(
        A_log=jnp.zeros(shape[-1]),
        dt_bias=jax.random.normal(keys[4], (shape[-1], _WIDTH)) - 4,
        lower_bound=-5.0,
    )
    d_results = tuple(
        jax.random.normal(keys[5], (shape[0], shape[2], _WIDTH, _WIDTH)) for _ in range(2)
    )
    return k, v, logits, beta, gate, d_results


def _transition(implementation, k, v, logits, beta, gate):
    return pallas_kernels.kda_transition(
        k, v, logits, beta, gate=gate, beta_logits=True, normalize_k=True,
        implementation=implementation,
    )  # fmt: skip


def _forward(implementation):
    return lambda *inputs: _transition(implementation, *inputs[:5])


def _forward_and_backward(implementation):
    def run(*inputs):
        results, transpose = jax.vjp(functools.partial(_transition, implementation), *inputs[:5])
        return results, transpose(inputs[5])

    return run


def _cases(size, shape):
    cells = shape[0] * shape[1] * shape[2]
    make_inputs = functools.partial(_arrays, shape, jnp.bfloat16)
    # Per token and head: scores of keys, their inverse and its product with the values and K more
    # columns; reading and updating a state of 2 K columns.
    flops = cells * 2 * _WIDTH * (3 * _CHUNK + 2 * 2 * _WIDTH)
    states = 2 * 4 * shape[0] * shape[2] * _WIDTH * _WIDTH
    row = 2 * cells * _WIDTH
    return [
        KernelCase(
            op="kda_transition",
            name="forward",
            size=size,
            make_inputs=make_inputs,
            function=_forward,
            flops=flops,
            bytes=3 * row + states,
        ),
        KernelCase(
            op="kda_transition",
            name="forward+backward",
            size=size,
            make_inputs=make_inputs,
            function=_forward_and_backward,
            flops=3.5 * flops,
            bytes=9 * row + 2 * states,
        ),
    ]


CASES = [*_cases("k3", (1, 8192, 12)), *_cases("small", (2, 130, 2))]
