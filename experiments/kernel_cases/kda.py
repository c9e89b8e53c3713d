"""KDA over rows of 8192 tokens: all 96 heads of K3, and the 12 of one of 8 chips."""

import functools

import jax
import jax.numpy as jnp

import pallas_kernels
from experiments import kda_baselines
from experiments.kernel_cases.case import KernelCase
from pallas_kernels.kda.mosaic_tpu import KDATiles

_WIDTH, _CHUNK, _BOUND = 128, 64, -5.0


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _arrays(shape, dtype, raw):
    """Operands of a call and the gradient of its output; shape is [B, T, H]."""
    keys = jax.random.split(jax.random.key(0), 7)
    q, k, v, logits, d_output = (
        jax.random.normal(key, (*shape, _WIDTH)) for key in keys[:5]
    )  # fmt: skip
    beta = jax.random.normal(keys[5], shape)
    # Zeros, as the baselines start from them; read all the same.
    state = jnp.zeros((shape[0], shape[2], _WIDTH, _WIDTH))
    gate = pallas_kernels.KDAGate(
        A_log=jnp.zeros(shape[2]),
        dt_bias=jax.random.normal(keys[6], (shape[2], _WIDTH)) - 4,
        lower_bound=_BOUND,
    )
    v, d_output = v.astype(dtype), d_output.astype(dtype)
    if raw:
        return (q.astype(dtype), k.astype(dtype), v, logits.astype(dtype), beta, state, gate,
                d_output)  # fmt: skip
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    activated = (q.astype(dtype), k.astype(dtype), v, gate(logits), jax.nn.sigmoid(beta))
    return *activated, state, None, d_output


def _kda(implementation, q, k, v, log_decay, beta, state, gate):
    raw = gate is not None
    return pallas_kernels.kda(
        q, k, v, log_decay, beta, initial_state=state, gate=gate, beta_logits=raw,
        normalize_qk=raw, log_decay_min=None if raw else _BOUND, implementation=implementation,
    )  # fmt: skip


def _forward(implementation):
    return lambda *inputs: _kda(implementation, *inputs[:7])


def _forward_and_backward(implementation):
    def run(*inputs):
        *tokens, state, gate, d_output = inputs

        def call(tokens, gate):
            return _kda(implementation, *tokens, state, gate)

        return _with_gradients(call, tuple(tokens), gate, d_output)

    return run


def _with_gradients(call, tokens, gate, d_output):
    (output, state), transpose = jax.vjp(call, tokens, gate)
    d_output = d_output.astype(output.dtype)
    return (output, state), transpose((d_output, jnp.zeros_like(state)))


def _packed(implementation):
    def run(*inputs):
        tokens = inputs[0].shape[1]
        ids = 1 + jnp.arange(tokens) // (tokens // 3)
        q, k, v, log_decay, beta, state, _ = inputs[:7]
        return pallas_kernels.kda(
            q, k, v, log_decay, beta, initial_state=state, log_decay_min=_BOUND,
            segment_ids=jnp.broadcast_to(ids, q.shape[:2]), implementation=implementation,
        )  # fmt: skip

    return run


def _unbounded(implementation):
    def run(*inputs):
        q, k, v, log_decay, beta, state, _ = inputs[:7]
        return pallas_kernels.kda(
            q, k, v, log_decay, beta, initial_state=state, implementation=implementation
        )

    return run


def _baseline_forward(*inputs):
    return kda_baselines.baseline_chunked(*inputs[:5])


def _baseline_forward_and_backward(*inputs):
    *tokens, _, gate, d_output = inputs
    call = lambda tokens, gate: kda_baselines.baseline_chunked(*tokens)  # noqa: E731
    return _with_gradients(call, tuple(tokens), gate, d_output)


def _cases(size, shape, dtype, *, raw=False, others=False, label=""):
    cells, states = shape[0] * shape[1] * shape[2], 4 * shape[0] * shape[2] * _WIDTH * _WIDTH
    label += f" {jnp.dtype(dtype).name}"
    # Per token: scores of keys and queries, the inverse times the values, and the state read by
    # both, written once.
    flops = cells * 2 * (3 * _CHUNK * _WIDTH + _CHUNK * _CHUNK + 3 * _WIDTH * _WIDTH)
    row = cells * _WIDTH * jnp.dtype(dtype).itemsize
    gate = row if raw else 4 * cells * _WIDTH
    forward = 4 * row + gate + 4 * cells + 2 * states
    heads = (1, 2, 3, 4, 6, 8)
    common = {
        "op": "kda",
        "size": size,
        "make_inputs": functools.partial(_arrays, shape, dtype, raw),
    }
    bounded = ("xla", "mosaic_tpu") + (("mosaic_gpu",) if dtype == jnp.bfloat16 else ())
    tuned, plain = size == "k3" and not others, size == "small" and not raw

    def candidates(*kernels):
        tiles = tuple(KDATiles(heads=n) for n in heads)
        return dict.fromkeys(kernels, tiles) if tuned else {}

    cases = [
        KernelCase(
            name=f"forward{label}",
            function=_forward,
            flops=flops,
            bytes=forward,
            baselines={"chunked": _baseline_forward} if plain else {},
            candidates=candidates("kda_forward_tpu"),
            implementations=bounded,
            **common,
        ),
        KernelCase(
            name=f"forward+backward{label}",
            function=_forward_and_backward,
            flops=3.5 * flops,
            # Both read the operands; gradients, and that of the output, are of their sizes.
            bytes=forward + 7 * row + 2 * gate + 8 * cells + 2 * states,
            baselines={"chunked": _baseline_forward_and_backward} if plain else {},
            candidates=candidates("kda_forward_tpu", "kda_backward_tpu"),
            implementations=bounded,
            **common,
        ),
    ]
    if others:
        for name, function, implementations in (
            (f"packed{label}", _packed, bounded),
            (f"unbounded{label}", _unbounded, ("xla", "mosaic_tpu")),
        ):
            cases.append(
                KernelCase(
                    name=name,
                    function=function,
                    flops=flops,
                    bytes=forward,
                    implementations=implementations,
                    **common,
                )
            )
    return cases


_ALL, _PART, _SMALL = (1, 8192, 96), (1, 8192, 12), (1, 256, 2)

CASES = [
    *_cases("k3", _PART, jnp.bfloat16, label=" 12 heads"),
    *_cases("k3", _PART, jnp.bfloat16, raw=True, label=" raw 12 heads"),
    *_cases("k3", _PART, jnp.float32, others=True, label=" 12 heads"),
    *_cases("k3", _ALL, jnp.bfloat16, raw=True, label=" raw 96 heads"),
    *_cases("k3", _ALL, jnp.float32, label=" 96 heads"),
    *_cases("small", _SMALL, jnp.bfloat16, others=True),
    *_cases("small", _SMALL, jnp.bfloat16, raw=True, label=" raw"),
    *_cases("small", _SMALL, jnp.float32),
]
