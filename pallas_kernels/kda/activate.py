"""From what the projections give to what the delta rule takes: norms of q and k, gate and beta."""

import jax
import jax.numpy as jnp

from pallas_kernels.kda.gate import KDAGate

# Inside the root, added to the sum of squares, as released.
NORM_EPS = 1e-6


def l2_normalize(x: jax.Array, eps: float = NORM_EPS) -> jax.Array:
    """X / sqrt(sum(x^2) + eps) over the last dimension, result float32 (float64 when x is)."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)


def activate(
    q: jax.Array,
    k: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    gate: KDAGate | None,
    beta_logits: bool,
    normalize_qk: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Apply the options of `kda` that the arrays still lack, in float32 (float64).

    Args:
        q: [..., H, K].
        k: [..., H, K].
        log_decay: [..., H, K], raw logits where a gate is given.
        beta: [..., H].
        gate: turns the logits into log decays.
        beta_logits: beta is before its sigmoid.
        normalize_qk: q and k are before their L2 norm.

    Returns:
        q, k, log_decay and beta as the delta rule takes them. Normalised, q and k stay in float32
        as in the released decoding kernel: rounding them would make prefill differ from decoding.
    """
    if normalize_qk:
        q, k = l2_normalize(q), l2_normalize(k)
    if gate is not None:
        log_decay = gate(log_decay)
    if beta_logits:
        beta = jax.nn.sigmoid(beta.astype(jnp.promote_types(beta.dtype, jnp.float32)))
    return q, k, log_decay, beta
