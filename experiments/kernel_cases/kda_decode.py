"""One token, and four of speculation, of a layer of K3: 96 heads, or the 12 of one of 8 chips."""

import functools

import jax
import jax.numpy as jnp

import pallas_kernels
from experiments.kernel_cases.case import KernelCase
from pallas_kernels.kda.decode_mosaic_tpu import DecodeTiles

_WIDTH, _TAPS = 128, 4


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _arrays(rows, num_tokens, heads, dtype):
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def normal(*shape, dtype=dtype):
        return jax.random.normal(next(keys), (*shape, heads, _WIDTH), dtype)

    tokens = [normal(rows, num_tokens) for _ in range(4)]
    beta = jax.random.normal(next(keys), (rows, num_tokens, heads), dtype)
    conv = pallas_kernels.KDAConv(
        tuple(normal(_TAPS, dtype=jnp.float32) / _TAPS for _ in range(3)),
        tuple(normal(rows, _TAPS - 1) for _ in range(3)),
    )
    gate = pallas_kernels.KDAGate(
        A_log=jnp.zeros(heads), dt_bias=normal(dtype=jnp.float32) - 4, lower_bound=-5.0
    )
    state = jax.random.normal(next(keys), (rows, heads, _WIDTH, _WIDTH))
    return (*tokens, beta, gate, conv, state)


def _decode(implementation, every_state=False):
    def run(q, k, v, decay_logits, beta_logits, gate, conv, state):
        return pallas_kernels.kda_decode(
            q, k, v, decay_logits, beta_logits, state, gate=gate, conv=conv, beta_logits=True,
            normalize_qk=True, every_state=every_state, implementation=implementation,
        )  # fmt: skip

    return run


def _in_parts(q, k, v, decay_logits, beta_logits, gate, conv, state):
    """The ops of prefill, one after the other."""
    convolved = [
        pallas_kernels.short_conv(x, weight, initial_state=tail, implementation="xla")
        for x, weight, tail in zip((q, k, v), conv.weights, conv.tails, strict=True)
    ]
    output, state = pallas_kernels.kda(
        *(x for x, _ in convolved), decay_logits, beta_logits, gate=gate, beta_logits=True,
        normalize_qk=True, initial_state=state, implementation="xla",
    )  # fmt: skip
    return output, state, tuple(tail for _, tail in convolved)


def _case(size, name, rows, num_tokens, heads, *, every_state=False):
    cells = rows * heads
    state_bytes = 4 * cells * _WIDTH * _WIDTH
    row_bytes = 2 * cells * _WIDTH
    return KernelCase(
        op="kda_decode",
        name=name,
        size=size,
        make_inputs=functools.partial(_arrays, rows, num_tokens, heads, jnp.bfloat16),
        function=functools.partial(_decode, every_state=every_state),
        flops=7 * cells * num_tokens * _WIDTH * _WIDTH,
        # The states; q, k, v, gate and output of each token; the tails, read and written.
        bytes=state_bytes * (1 + (num_tokens if every_state else 1))
        + row_bytes * (5 * num_tokens + 6 * (_TAPS - 1)),
        baselines={} if every_state else {"in parts": _in_parts},
        candidates={"kda_decode_tpu": tuple(DecodeTiles(heads=heads) for heads in (16, 32, 48))}
        if size == "k3" and heads == 96
        else {},
    )


CASES = [
    _case("k3", "1 token", 32, 1, 96),
    _case("k3", "4 tokens", 32, 4, 96),
    _case("k3", "4 tokens, every state", 32, 4, 96, every_state=True),
    _case("k3", "1 token, 12 heads", 128, 1, 12),
    _case("small", "1 token", 2, 1, 4),
    _case("small", "4 tokens", 2, 4, 4),
]
