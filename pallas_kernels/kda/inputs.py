"""What `kda` accepts: shapes, dtypes and promises, checked before anything runs."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.checks import (
    require_floating,
    require_int,
    require_integer,
    require_rank,
    require_shape,
    static_float,
)
from pallas_kernels.debug import check_values, is_debugging
from pallas_kernels.kda.gate import KDAGate, check_gate


def check_inputs(
    q, k, v, log_decay, beta, initial_state=None, segment_ids=None, num_segments=None,
    log_decay_min=None, gate=None,
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
    if num_segments is not None:
        require_int(op, num_segments=num_segments)
        if num_segments < 1:
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
    if isinstance(log_decay_min, jax.core.Tracer):
        static_float(op, log_decay_min=log_decay_min)
    if log_decay_min is not None and not (-math.inf < log_decay_min <= 0):
        raise ValueError(
            f"{op}: log_decay_min={log_decay_min} must be a finite number <= 0, or None when the "
            "decay has no bound"
        )
    if gate is not None:
        if not isinstance(gate, KDAGate):
            raise TypeError(f"{op}: gate is a {type(gate).__name__}; give a KDAGate or None")
        check_gate(op, log_decay, gate.A_log, gate.dt_bias, gate.lower_bound)
        if log_decay_min is not None:
            raise ValueError(
                f"{op}: log_decay_min={log_decay_min} is given beside a gate, whose lower_bound="
                f"{gate.lower_bound} says it; leave it out"
            )


def check_positions(state_positions, num_rows, num_tokens, segment_ids, num_segments) -> None:
    """Raise unless `state_positions` fit the other arguments of `kda`."""
    if state_positions is None:
        return
    require_integer("kda", state_positions=state_positions)
    expected = (num_rows, state_positions.shape[-1] if state_positions.ndim else 0)
    require_shape("kda", expected, "= [B, P]", state_positions=state_positions)
    if segment_ids is not None and num_segments is None:
        raise ValueError(
            "kda: state_positions beside segment_ids needs num_segments, the most runs of a row; "
            "1 where the ids mark padding only"
        )

    def summarise(xp, positions):
        return (
            xp.any(positions[:, 1:] < positions[:, :-1]),
            xp.min(positions, initial=0),
            xp.max(positions, initial=0),
        )

    def problem(decreases, lowest, highest):
        if decreases:
            return "kda: state_positions decrease along a row; sort them"
        if lowest < 0 or highest > num_tokens:
            return (
                f"kda: state_positions hold {lowest if lowest < 0 else highest}, outside "
                f"0..{num_tokens}, the tokens of a row"
            )
        return None

    check_values(summarise, problem, state_positions)


def check_decay(op: str, log_decay, segment_ids, log_decay_min) -> None:
    """Raise ValueError where the decay of a real token is above 0 or below the promised minimum.

    Checked where it is free, and everywhere in debug mode (`pallas_kernels.debug_checks`), which
    reports NaN, too; outside of it NaN shows in the results.
    """
    refuses_nan = is_debugging()

    def summarise(xp, log_decay, *segment_ids):
        if segment_ids:
            log_decay = xp.where(segment_ids[0][..., None, None] != 0, log_decay, 0)
        return xp.max(log_decay, initial=0), xp.min(log_decay, initial=0)

    def problem(highest, lowest):
        if refuses_nan and math.isnan(highest):
            return f"{op}: log_decay holds NaN"
        if highest > 0:
            return (
                f"{op}: log_decay holds {highest:.3g}, above 0: the state would grow; give the "
                "output of kda_gate, or raw logits with gate="
            )
        if log_decay_min is not None and lowest < log_decay_min:
            return (
                f"{op}: log_decay holds {lowest:.3g}, below the promised log_decay_min="
                f"{log_decay_min}"
            )
        return None

    ids = () if segment_ids is None else (segment_ids,)
    check_values(summarise, problem, log_decay, *ids)


def compute_dtype(*arrays: jax.Array) -> jnp.dtype:
    """Return float64 when any array is, else float32."""
    is_double = any(array.dtype == jnp.float64 for array in arrays)
    return jnp.dtype(jnp.float64 if is_double else jnp.float32)
