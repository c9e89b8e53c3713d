"""One or a few tokens of the delta rule from a state, with everything before it fused in."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checks import require_floating, require_rank, require_shape, static_float
from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.kda import (
    decode_mosaic_gpu,
    decode_mosaic_tpu,
    decode_reference,
    decode_xla,
)
from pallas_kernels.kda.gate import KDAGate
from pallas_kernels.kda.inputs import check_decay, check_inputs, compute_dtype

# Steps of speculation; `kda` is faster for more tokens.
_MAX_TOKENS = 8

_FORMS = {
    "reference": decode_reference.decode,
    "xla": decode_xla.decode,
    "mosaic_tpu": decode_mosaic_tpu.decode,
    "mosaic_gpu": decode_mosaic_gpu.decode,
}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("weights", "tails"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class KDAConv:
    """The short convolutions before the delta rule; a pytree.

    Attributes:
        weights: taps of q, k and v, [W, H, K], [W, H, K] and [W, H, V], oldest first.
        tails: the W - 1 raw inputs before these tokens, [B, W-1, H, K] twice and [B, W-1, H, V].
    """

    weights: tuple[jax.Array, jax.Array, jax.Array]
    tails: tuple[jax.Array, jax.Array, jax.Array]


def kda_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float | None = None,
    gate: KDAGate | None = None,
    beta_logits: bool = False,
    normalize_qk: bool = False,
    conv: KDAConv | None = None,
    every_state: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Run one token of `kda`, or a few, from a state.

    In this order, each where asked for: `silu(conv(x))` of q, k and v as `short_conv` computes it
    (rounded to their dtype), their L2 norm, the gate, the sigmoid of beta, the delta rule. The
    kernels read and write the state once. That of TPU updates donated states and tails in place,
    that of GPU writes new ones.

    Args:
        q: [B, T, H, K] with T from 1 to 8, or [B, H, K] for one token; the others then lack the
            token dimension, too. Kernels take float32 and bfloat16, "xla" and "reference" any
            float type.
        k: [B, T, H, K].
        v: [B, T, H, V].
        log_decay: [B, T, H, K], raw logits with `gate`.
        beta: [B, T, H].
        state: [B, H, K, V].
        scale: static; multiplies the output. None is K**-0.5.
        gate: as in `kda`.
        beta_logits: likewise.
        normalize_qk: likewise.
        conv: q, k and v are raw inputs of these convolutions.
        every_state: return states and tails after each token. Speculation needs them: they cannot
            be rolled back, only chosen by the number of accepted tokens.
        implementation: "reference", "xla", "mosaic_tpu", "mosaic_gpu" or None (chosen by a table).
            The kernels have no gradient and say so; "xla" has.

    Returns:
        output [B, T, H, V] ([B, H, V]) in v's dtype, and the new state [B, H, K, V] float32
        (float64 when q, k or v are float64). With `conv` also the new tails, a tuple like those
        given, in the dtypes of q, k and v. With `every_state` states [B, T, H, K, V] and tails
        [B, T, W-1, H, K] (without T for inputs that lack it).

    Raises:
        ValueError: a shape does not fit, or (where it is free to tell, and everywhere in debug
            mode) a decay is above zero.
        TypeError: an array has the wrong kind of dtype, or scale is traced.
        NotImplementedError: the named kernel does not take these arguments (among them B = 0,
            which "xla" takes) or this device.
    """
    require_floating("kda_decode", q=q)
    has_token_axis = q.ndim == 4
    if not has_token_axis:
        if q.ndim != 3:
            raise ValueError(
                f"kda_decode: q has shape {q.shape}; expected [B, H, K] or [B, 1, H, K] "
                f"to [B, {_MAX_TOKENS}, H, K]"
            )
        q, k, v, log_decay, beta = (jnp.expand_dims(x, 1) for x in (q, k, v, log_decay, beta))
    check_inputs(q, k, v, log_decay, beta, state, gate=gate, op="kda_decode", state="state")
    if not 1 <= q.shape[1] <= _MAX_TOKENS:
        raise ValueError(
            f"kda_decode: q has {q.shape[1]} tokens; it takes one to {_MAX_TOKENS}, "
            "use kda for more"
        )
    if gate is None:
        check_decay("kda_decode", log_decay, None, None)
    q, k, v, log_decay, beta, state = map(jnp.asarray, (q, k, v, log_decay, beta, state))
    if conv is not None:
        conv = _check_conv(conv, q, k, v)
    tokens, options = (q, k, v, log_decay, beta), {
        "gate": gate, "conv": conv, "beta_logits": beta_logits, "normalize_qk": normalize_qk,
        "scale": q.shape[-1] ** -0.5 if scale is None else static_float("kda_decode", scale=scale),
        "every_state": every_state,
    }  # fmt: skip
    limits = {
        "mosaic_tpu": lambda: decode_mosaic_tpu.unsupported(tokens, state, every_state=every_state),
        "mosaic_gpu": lambda: decode_mosaic_gpu.unsupported(tokens, state),
    }
    chosen = choose_implementation("kda_decode", implementation, limits)
    with jax.named_scope("kda_decode"):
        state = state.astype(compute_dtype(q, k, v))
        output, state, tails = _FORMS[chosen](tokens, state, **options)
    results: tuple[Any, ...] = (output.astype(v.dtype), state)
    if not has_token_axis:
        results = (output[:, 0].astype(v.dtype), state[:, 0] if every_state else state)
        tails = tuple(x[:, 0] for x in tails) if every_state and conv is not None else tails
    return results if conv is None else (*results, tails)


def _check_conv(conv: KDAConv, q, k, v) -> KDAConv:
    """Raise unless the convolutions fit; return them with tails in the dtype of their inputs."""
    op = "kda_decode"
    if not isinstance(conv, KDAConv):
        raise TypeError(f"{op}: conv is a {type(conv).__name__}; give a KDAConv or None")
    taps = conv.weights[0].shape[0] if conv.weights[0].ndim else 0
    if taps < 2:
        raise ValueError(f"{op}: conv.weights need at least 2 taps, [W, H, K]; got {taps}")
    tails = []
    for name, x, weight, tail in zip("qkv", (q, k, v), conv.weights, conv.tails, strict=True):
        weights, before = {f"conv.weights of {name}": weight}, {f"conv.tails of {name}": tail}
        require_rank(op, "W H K", **weights)
        require_floating(op, **weights, **before)
        require_shape(op, (taps, *x.shape[2:]), f"(W, and H and K of {name})", **weights)
        expected = (x.shape[0], taps - 1, *x.shape[2:])
        require_shape(op, expected, f"(B, W-1, H, K of {name})", **before)
        tails.append(tail.astype(x.dtype))
    return KDAConv(conv.weights, tuple(tails))
