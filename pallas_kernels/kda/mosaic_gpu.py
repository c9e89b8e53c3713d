"""KDA on Hopper GPUs: kernels over all chunks at once around one that the state runs through.

Forward: `mosaic_gpu_prepare` (decayed keys and queries, scores and their inverse), then
`mosaic_gpu_states`. Backward: the first once more, then `mosaic_gpu_states_backward`, then
`mosaic_gpu_gradient`. Between them the operands but v are kept, and in bfloat16 the states before
the chunks and the corrections, which take the place of v.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.checks import align_varying
from pallas_kernels.kda.activate import l2_normalize
from pallas_kernels.kda.gate import kda_gate
from pallas_kernels.kda.mosaic_gpu_gradient import run_gradients
from pallas_kernels.kda.mosaic_gpu_layout import Layout, occurring, pad, place_tokens
from pallas_kernels.kda.mosaic_gpu_prepare import Prepared, prepare
from pallas_kernels.kda.mosaic_gpu_states import run_states
from pallas_kernels.kda.mosaic_gpu_states_backward import run_states_backward

# The lowest log decay that tiles split at their middle row can hold.
_LOWEST_BOUND = -5.0

# Key channels of a state that fit in the registers of a program.
_LARGEST_KEY_DIM = 128


def unsupported(q, k, v, log_decay, beta, *, log_decay_min) -> str | None:
    """Why the kernels do not take these arguments, or None when they do.

    Args:
        q: [B, T, H, K], before its norm.
        k: likewise.
        v: [B, T, H, V].
        log_decay: [B, T, H, K], or raw logits.
        beta: [B, T, H].
        log_decay_min: promise on the decay, that of a gate is its lower bound; or None.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        # Three bfloat16 parts of float32 operands would take six times the products.
        if array.dtype != jnp.bfloat16:
            return f"{name} has dtype {array.dtype}; the kernel takes bfloat16"
    for name, array in (("log_decay", log_decay), ("beta", beta)):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} has dtype {array.dtype}; the kernel takes float32 and bfloat16"
    if q.shape[-1] > _LARGEST_KEY_DIM:
        return f"q has head size {q.shape[-1]}; the kernel takes up to {_LARGEST_KEY_DIM}"
    if log_decay_min is None or log_decay_min < _LOWEST_BOUND:
        return (
            f"log_decay_min={log_decay_min}; the kernel takes decays with a bound of at least "
            f"{_LOWEST_BOUND} per token"
        )
    return None


def kda_mosaic_gpu(
    q, k, v, log_decay, beta, A_log=None, dt_bias=None,
    *, scale, initial_state, segment_ids, per_run, continues=None, log_decay_min=None,
    lower_bound=None, beta_logits=False, normalize_qk=False, norm_eps=1e-6,
):  # fmt: skip
    """Compute what `kda_reference` defines, for arguments that `unsupported` lets pass.

    Args:
        q: [B, T, H, K] bfloat16.
        k: [B, T, H, K] bfloat16.
        v: [B, T, H, V] bfloat16.
        log_decay: [B, T, H, K] float32 or bfloat16; raw logits when `A_log` is given.
        beta: [B, T, H] float32 or bfloat16.
        A_log: [H], of the gate (`kda_gate`), or None when `log_decay` is activated.
        dt_bias: [H, K] or [H * K], likewise.
        scale: multiplies the output.
        initial_state: [B, N, H, K, V] float32.
        segment_ids: [B, T] integers, 0 where a token is absent, or None.
        per_run: whether the N states belong to the first N runs, else N is 1.
        continues: [B, N] bool, runs that start from what the run before leaves behind, not from
            their initial state; None is none. Needs `per_run`.
        log_decay_min: promise on the decay, from -5 on; the kernels need it, and read it nowhere.
        lower_bound: of the gate.
        beta_logits: beta are logits.
        normalize_qk: divide q and k by `sqrt(sum(x^2) + norm_eps)` first.
        norm_eps: of the normalisation.

    Returns:
        (output [B, T, H, V] bfloat16, final_state [B, N, H, K, V] float32).
    """
    del log_decay_min
    real = None if segment_ids is None else segment_ids != 0
    if segment_ids is None and per_run and initial_state.shape[1] > 1:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    # Absent tokens may hold anything, and gradients of 0 do not pass a NaN as 0.
    q, k, v, log_decay, beta = (_present(x, real) for x in (q, k, v, log_decay, beta))
    if normalize_qk:
        q, k = (l2_normalize(x, norm_eps).astype(jnp.bfloat16) for x in (q, k))
    if A_log is not None:
        log_decay = kda_gate(log_decay, A_log, dt_bias, lower_bound=lower_bound)
        log_decay = _present(log_decay, real)
    beta = beta.astype(jnp.float32)
    if beta_logits:
        beta = jax.nn.sigmoid(beta)

    num_runs, _, key_dim, value_dim = initial_state.shape[1:]
    placement = place_tokens(q.shape[1], num_runs, segment_ids, per_run, continues)
    arrays = [placement.place(x) for x in (q, k, v, log_decay, beta)]
    arrays[:4] = [pad(x, -1) for x in arrays[:4]]
    arrays[4] = jnp.moveaxis(arrays[4], 1, 2)
    state = pad(pad(initial_state, -1), -2)
    output, final_state = _run(float(scale), *align_varying(*arrays, state), placement.layout)
    final_state = final_state[..., :key_dim, :value_dim]
    runs = placement.layout.runs
    if runs is not None:
        occurs = occurring(runs, num_runs, fresh=False)[..., None, None, None]
        final_state = jnp.where(occurs, final_state, initial_state)
    return placement.take_back(output)[..., :value_dim], final_state


def _present(x: jax.Array, real: jax.Array | None) -> jax.Array:
    """Replace what absent tokens hold by zeros."""
    return x if real is None else jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(scale, q, k, v, log_decay, beta, initial_state, layout):
    prepared = _prepare(scale, q, k, log_decay, beta, layout)
    output, final_state = run_states(v, beta, prepared, initial_state, layout.runs, keep=False)
    return output, final_state


def _run_forward(scale, q, k, v, log_decay, beta, initial_state, layout):
    prepared = _prepare(scale, q, k, log_decay, beta, layout)
    output, final_state, *kept = run_states(
        v, beta, prepared, initial_state, layout.runs, keep=True
    )
    return (output, final_state), (q, k, log_decay, beta, layout, *kept)


def _run_backward(scale, residuals, cotangents):
    q, k, log_decay, beta, layout, states, corrections = residuals
    d_output, d_final_state = cotangents
    prepared = _prepare(scale, q, k, log_decay, beta, layout)
    d_v, d_beta, d_states, d_initial_state = run_states_backward(
        d_output, beta, prepared, corrections, d_final_state, layout.runs
    )
    d_q, d_k, d_log_decay = run_gradients(
        q, k, log_decay, beta, layout.marks, prepared.total, d_output, d_v, corrections, states,
        d_states, scale=scale,
    )  # fmt: skip
    if layout.runs is not None:
        started = occurring(layout.runs, d_final_state.shape[1], fresh=True)
        d_initial_state = jnp.where(started[..., None, None, None], d_initial_state, 0)
    return d_q, d_k, d_v, d_log_decay, jnp.sum(d_beta, axis=1), d_initial_state, None


_run.defvjp(_run_forward, _run_backward)


def _prepare(scale, q, k, log_decay, beta, layout: Layout) -> Prepared:
    prepared = prepare(q, k, log_decay, beta, layout.marks, scale=scale)
    if layout.resets is None:
        return prepared
    # No state passes a chunk that ends in another run.
    total = jnp.where(layout.resets[:, None, :, None], -jnp.inf, prepared.total)
    return prepared._replace(total=total)
