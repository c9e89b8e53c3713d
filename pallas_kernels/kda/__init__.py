"""Kimi Delta Attention: a recurrence with one decay per key channel and a delta-rule update."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.kda.gate import kda_gate
from pallas_kernels.kda.inputs import check_inputs, compute_dtype
from pallas_kernels.kda.reference import kda_reference
from pallas_kernels.kda.segments import check_num_segments
from pallas_kernels.kda.xla import kda_xla

__all__ = ["kda", "kda_decode", "kda_gate"]


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    log_decay_min: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Run the gated delta rule over T tokens.

    Per head, with the state `S [K, V]`, for each token::

        S <- diag(exp(log_decay)) S
        S <- S + k (beta (v - S^T k))^T
        output = scale S^T q

    Computed in float32 (float64 when q, k or v are float64). Differentiable in every array, through
    both results. Tokens with segment id 0 are as if absent: output 0, state unchanged, wherever
    they stand and whatever they hold. A *run* is a maximal stretch of real tokens of one id
    (absent tokens between do not end it); the state starts anew with each run.

    Args:
        q: [B, T, H, K], used as given (normalise before). Floating, as all arrays but the ids.
        k: [B, T, H, K], likewise.
        v: [B, T, H, V].
        log_decay: [B, T, H, K], <= 0; may be as low as -inf.
        beta: [B, T, H], already activated.
        scale: multiplies the output; None is K**-0.5.
        initial_state: [B, H, K, V], the state before the first run (later runs start at zero).
            With `num_segments` [B, num_segments, H, K, V], the state before each run. None: zeros.
        segment_ids: [B, T] integers; None is one run of real tokens.
        num_segments: static; states are kept per run, in order of appearance. A row with more runs
            is refused where the ids are concrete; under `jit` its excess tokens give NaN.
        log_decay_min: static promise that every `log_decay` is at least this; from -5 on it selects
            faster arithmetic. None is right for any decay. If the promise is broken the result is
            undefined.
        implementation: "reference" (token by token), "xla" (chunks) or None (chosen by a table).

    Returns:
        output [B, T, H, V] in v's dtype, and the state after the last real token, float32
        [B, H, K, V]; with `num_segments` the state after each run, [B, num_segments, H, K, V]. A
        run that does not occur keeps its initial state.

    Raises:
        ValueError: a shape does not fit, `log_decay_min` is positive, or a row has too many runs.
        TypeError: an array has the wrong kind of dtype.
        NotImplementedError: the implementation is not built.
    """
    chosen = choose_implementation("kda", implementation)
    check_inputs(q, k, v, log_decay, beta, initial_state, segment_ids, num_segments, log_decay_min)
    check_num_segments(segment_ids, num_segments)
    num_rows, _, num_heads, key_dim = q.shape
    dtype = compute_dtype(q, k, v)
    output_dtype = v.dtype
    scale = key_dim**-0.5 if scale is None else scale
    num_runs = 1 if num_segments is None else num_segments
    if initial_state is None:
        initial_state = jnp.zeros((num_rows, num_runs, num_heads, key_dim, v.shape[-1]), dtype)
    elif num_segments is None:
        initial_state = initial_state[:, None]
    initial_state = initial_state.astype(dtype)
    with jax.named_scope("kda"):
        if q.size == 0:
            output, final_state = v, initial_state
        elif chosen == "reference":
            arrays = (x.astype(dtype) for x in (q, k, v, log_decay, beta))
            output, final_state = kda_reference(
                *arrays, scale=scale, initial_state=initial_state,
                segment_ids=segment_ids, per_run=num_segments is not None,
            )  # fmt: skip
        else:
            output, final_state = kda_xla(
                q, k, v, log_decay, beta, scale=scale, initial_state=initial_state,
                segment_ids=segment_ids, per_run=num_segments is not None,
                log_decay_min=log_decay_min,
            )  # fmt: skip
    if num_segments is None:
        final_state = final_state[:, 0]
    return output.astype(output_dtype), final_state


def kda_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Run one token of `kda` from a state.

    Args:
        q: [B, H, K], or [B, 1, H, K] as `kda` takes it; the others then have the token dimension,
            too.
        k: [B, H, K].
        v: [B, H, V].
        log_decay: [B, H, K].
        beta: [B, H].
        state: [B, H, K, V].
        scale: multiplies the output; None is K**-0.5.

    Returns:
        output [B, H, V] ([B, 1, H, V] when the inputs have the token dimension) in v's dtype, and
        the new state [B, H, K, V] float32 (float64 when q, k or v are float64).

    Raises:
        ValueError: a shape does not fit.
        TypeError: an array has the wrong kind of dtype.
    """
    has_token_axis = q.ndim == 4
    if not has_token_axis:
        if q.ndim != 3:
            raise ValueError(
                f"kda_decode: q has shape {q.shape}; expected [B, H, K] or [B, 1, H, K]"
            )
        q, k, v, log_decay, beta = (jnp.expand_dims(x, 1) for x in (q, k, v, log_decay, beta))
    check_inputs(q, k, v, log_decay, beta, state, None, None, None, op="kda_decode", state="state")
    if q.shape[1] != 1:
        raise ValueError(f"kda_decode: q has {q.shape[1]} tokens; it takes one, use kda for more")
    dtype = compute_dtype(q, k, v)
    output_dtype = v.dtype
    q, k, v, log_decay, beta = (x[:, 0].astype(dtype) for x in (q, k, v, log_decay, beta))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with jax.named_scope("kda_decode"):
        # Matrix products: sums over the key dimension are many times slower on CPU.
        decayed = jnp.exp(log_decay)[..., None] * state.astype(dtype)  # [B, H, K, V]
        predicted = jnp.einsum("bhk,bhkv->bhv", k, decayed, precision=jax.lax.Precision.HIGHEST)
        update = beta[..., None] * (v - predicted)
        state = decayed + k[..., None] * update[..., None, :]
        output = jnp.einsum("bhk,bhkv->bhv", scale * q, state, precision=jax.lax.Precision.HIGHEST)
    output = output.astype(output_dtype)
    return (output[:, None] if has_token_axis else output), state
