"""The two decay gates of KDA."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.checks import require_floating, require_rank, static_float

# Above this softplus is the identity, as in the released kernels; also keeps exp from overflowing.
_SOFTPLUS_IDENTITY = 20.0


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("A_log", "dt_bias"),
    meta_fields=("lower_bound",),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class KDAGate:
    """Parameters of `kda_gate`, given to ops that take raw decay logits; a pytree.

    Attributes:
        A_log: [H], one scalar per head.
        dt_bias: [H, K], or flat [H * K], head-major.
        lower_bound: static; None selects the unbounded gate.
    """

    A_log: jax.Array
    dt_bias: jax.Array
    lower_bound: float | None

    def __call__(self, logits: jax.Array) -> jax.Array:
        """Return `kda_gate(logits, ...)`, [..., H, K] -> [..., H, K] float32."""
        return kda_gate(logits, self.A_log, self.dt_bias, lower_bound=self.lower_bound)


def kda_gate(
    logits: jax.Array, A_log: jax.Array, dt_bias: jax.Array, *, lower_bound: float | None
) -> jax.Array:
    """Turn raw decay logits into log decays.

    With `s = logits + dt_bias`::

        lower_bound * sigmoid(exp(A_log) * s)      in (lower_bound, 0), when a bound is given
        -exp(A_log) * softplus(s)                  otherwise; softplus(s) = s above 20

    Args:
        logits: [B, T, H, K] (any leading dimensions).
        A_log: [H], one scalar per head.
        dt_bias: [H, K], or flat [H * K], head-major.
        lower_bound: static; None selects the unbounded gate.

    Returns:
        log_decay with the shape of `logits`, float32 (float64 when the logits are float64).

    Raises:
        ValueError: a shape does not fit, or `lower_bound` is not negative.
        TypeError: an array is not floating.
    """
    check_gate("kda_gate", logits, A_log, dt_bias, lower_bound)
    num_heads, key_dim = logits.shape[-2:]
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    shifted = logits.astype(dtype) + dt_bias.astype(dtype).reshape(num_heads, key_dim)
    rate = jnp.exp(A_log.astype(dtype))[:, None]
    with jax.named_scope("kda_gate"):
        return shifted_gate(shifted, rate, lower_bound)


def shifted_gate(shifted: jax.Array, rate: jax.Array, lower_bound: float | None) -> jax.Array:
    """The formula of `kda_gate` from logits + dt_bias and exp(A_log), of shapes that broadcast."""
    if lower_bound is not None:
        return lower_bound * jax.nn.sigmoid(rate * shifted)
    # The argument is replaced before exp: a `where` after it would give NaN gradients.
    saturated = shifted > _SOFTPLUS_IDENTITY
    soft = jnp.log1p(jnp.exp(jnp.where(saturated, 0.0, shifted)))
    return -rate * jnp.where(saturated, shifted, soft)


def check_gate(
    op: str,
    logits: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    lower_bound: float | None,
) -> None:
    """Raise ValueError or TypeError unless the parameters of a gate fit the logits [..., H, K]."""
    require_floating(op, logits=logits, A_log=A_log, dt_bias=dt_bias)
    require_rank(op, "H", A_log=A_log)
    if logits.ndim < 2:
        raise ValueError(f"{op}: logits has shape {logits.shape}; expected [..., H, K]")
    num_heads, key_dim = logits.shape[-2:]
    if A_log.shape != (num_heads,):
        raise ValueError(
            f"{op}: A_log has shape {A_log.shape}; expected ({num_heads},), one value per head"
        )
    if dt_bias.shape not in ((num_heads, key_dim), (num_heads * key_dim,)):
        raise ValueError(
            f"{op}: dt_bias has shape {dt_bias.shape}; expected ({num_heads}, {key_dim}) or "
            f"({num_heads * key_dim},)"
        )
    if isinstance(lower_bound, jax.core.Tracer):
        static_float(op, lower_bound=lower_bound)
    if lower_bound is not None and not -math.inf < lower_bound < 0:
        raise ValueError(f"{op}: lower_bound={lower_bound} must be negative (-5.0), or None")
