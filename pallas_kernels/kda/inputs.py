"""What `kda` accepts: shapes, dtypes and promises, checked before anything runs."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.checks import require_floating, require_integer, require_rank, require_shape


def check_inputs(
    q, k, v, log_decay, beta, initial_state, segment_ids, num_segments, log_decay_min,
    *, op="kda", state="initial_state",
) -> None:  # fmt: skip
    """Raise ValueError or TypeError unless the arguments of `kda` fit together."""
    require_rank(op, "B T H K", q=q, k=k, log_decay=log_decay)
    require_rank(op, "B T H V", v=v)
    require_rank(op, "B T H", beta=beta)
    require_floating(op, q=q, k=k, v=v, log_decay=log_decay, beta=beta)
    require_shape(op, q.shape, "from q", k=k, log_decay=log_decay)
    require_shape(op, (*q.shape[:3], v.shape[-1]), "from q and v's last dimension", v=v)
    require_shape(op, q.shape[:3], "from q", beta=beta)
    if min(*q.shape[2:], v.shape[-1]) == 0:
        raise ValueError(f"{op}: q {q.shape} and v {v.shape} need H, K and V of at least 1")
    if num_segments is not None and num_segments < 1:
        raise ValueError(f"{op}: num_segments={num_segments} must be at least 1, or None")
    if initial_state is not None:
        runs = () if num_segments is None else (num_segments,)
        letters = "[B, H, K, V]" if num_segments is None else "[B, num_segments, H, K, V]"
        expected = (q.shape[0], *runs, q.shape[2], q.shape[3], v.shape[-1])
        require_shape(op, expected, f"= {letters}, keys before values", **{state: initial_state})
        require_floating(op, **{state: initial_state})
    if segment_ids is not None:
        require_integer(op, segment_ids=segment_ids)
        require_shape(op, q.shape[:2], "= [B, T] from q", segment_ids=segment_ids)
    if log_decay_min is not None and not (-math.inf < log_decay_min <= 0):
        raise ValueError(
            f"{op}: log_decay_min={log_decay_min} must be a finite number <= 0, or None when the "
            "decay has no bound"
        )


def compute_dtype(*arrays: jax.Array) -> jnp.dtype:
    """Return float64 when any array is, else float32."""
    is_double = any(array.dtype == jnp.float64 for array in arrays)
    return jnp.dtype(jnp.float64 if is_double else jnp.float32)
