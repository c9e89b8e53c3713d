"""What a stretch of tokens does to the state, for context parallelism.

The state after a stretch is an affine function of the state before it, `S_end = M S_start + b`:
every token multiplies the state from the left by `(I - beta k k^T) diag(exp(log_decay))` and adds
`beta k v^T`. The columns of the state never mix, so that one run of the delta rule gives both: M is
where K columns without values get from the identity.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.checks import require_floating
from pallas_kernels.debug import check_segment_order
from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.kda.forms import Operands, limits, run_form
from pallas_kernels.kda.gate import KDAGate
from pallas_kernels.kda.inputs import check_decay, check_inputs

# Widest state that the kernels take; above it M and b are runs of their own.
_MAX_VALUE_DIM = 256


def kda_transition(
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    gate: KDAGate | None = None,
    beta_logits: bool = False,
    normalize_k: bool = False,
    log_decay_min: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return M and b such that these tokens turn a state S into `M S + b`, whatever S is.

    With S as its `initial_state`, `kda` of the same tokens ends in that state. Differentiable in
    every array, through both results.

    Args:
        k: [B, T, H, K]. This and what follows is as `kda` takes it.
        v: [B, T, H, V].
        log_decay: [B, T, H, K].
        beta: [B, T, H].
        segment_ids: [B, T] integers or None. The state belongs to the first run of real tokens;
            where another run begins M is 0, and b is what the last run leaves. A row without real
            tokens has the identity and 0.
        gate: log_decay holds raw logits of this gate.
        beta_logits: beta is before its sigmoid.
        normalize_k: k is before its L2 norm.
        log_decay_min: promise on log_decay.
        implementation: as in `kda`.

    Returns:
        (M [B, H, K, K], b [B, H, K, V]), float32 (float64 when k or v is).

    Raises:
        ValueError: a shape does not fit.
        TypeError: an array has the wrong kind of dtype.
        NotImplementedError: the implementation is not built or does not take these arguments.
    """
    check_inputs(
        k, k, v, log_decay, beta, None, segment_ids, None, log_decay_min, gate, op="kda_transition"
    )
    if gate is None:
        check_decay("kda_transition", log_decay, segment_ids, log_decay_min)
    check_segment_order("kda_transition", segment_ids)
    k, v, log_decay, beta = map(jnp.asarray, (k, v, log_decay, beta))
    operands = Operands(
        q=k, k=k, v=v, log_decay=log_decay, beta=beta, gate=gate, beta_logits=beta_logits,
        normalize_qk=normalize_k, log_decay_min=log_decay_min,
    )  # fmt: skip
    chosen = choose_implementation("kda", implementation, limits(_calls(operands)[-1]))
    with jax.named_scope("kda_transition"):
        return run_transition(chosen, operands, segment_ids=segment_ids)


def run_transition(
    chosen: str, operands: Operands, *, segment_ids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Compute what `kda_transition` returns; the q of the operands is not read."""
    num_rows, _, num_heads, key_dim = operands.k.shape
    value_dim, dtype = operands.v.shape[-1], operands.dtype
    identity = jnp.broadcast_to(
        jnp.eye(key_dim, dtype=dtype), (num_rows, num_heads, key_dim, key_dim)
    )
    zeros = jnp.zeros((num_rows, num_heads, key_dim, value_dim), dtype)

    def final_state(call, start):
        if call.k.size == 0:
            return start
        return run_form(
            chosen, call, scale=1.0, initial_state=start[:, None], segment_ids=segment_ids,
            per_run=False,
        )[1][:, 0]  # fmt: skip

    calls = _calls(operands)
    if len(calls) == 1:
        state = final_state(calls[0], jnp.concatenate([zeros, identity], axis=-1))
        return state[..., value_dim:], state[..., :value_dim]
    return final_state(calls[1], identity), final_state(calls[0], zeros)


def _calls(operands: Operands) -> list[Operands]:
    """Return the run that gives b and M side by side, or where that is too wide one of each."""
    q = jnp.zeros_like(operands.k)
    columns = jnp.zeros(operands.k.shape, operands.v.dtype)
    if operands.k.shape[-1] + operands.v.shape[-1] > _MAX_VALUE_DIM:
        return [dataclasses.replace(operands, q=q), dataclasses.replace(operands, q=q, v=columns)]
    return [dataclasses.replace(operands, q=q, v=jnp.concatenate([operands.v, columns], axis=-1))]


def compose_transitions(matrices: jax.Array, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the transition over the first 1, 2, ... R of R consecutive stretches.

    `(M, b)` after `(M', b')` is `(M M', M b' + b)`, which is associative: depth log R.

    Args:
        matrices: [R, ..., K, K], M of each stretch, earliest first.
        states: [R, ..., K, V], b of each stretch.

    Returns:
        ([R, ..., K, K], [R, ..., K, V]). With the state S before all of them, the state after
        stretch r is `matrices[r] S + states[r]`.

    Raises:
        ValueError: shapes disagree.
        TypeError: an array is not floating point.
    """
    op = "compose_transitions"
    require_floating(op, matrices=matrices, states=states)
    shape, width = tuple(states.shape), states.shape[-2:-1]
    if states.ndim < 3 or tuple(matrices.shape) != (*shape[:-1], *width):
        raise ValueError(
            f"{op}: matrices {tuple(matrices.shape)} and states {shape} must be [R, ..., K, K] and "
            "[R, ..., K, V]"
        )

    def compose(earlier, later):
        (matrix, state), (next_matrix, next_state) = earlier, later
        return _product(next_matrix, matrix), _product(next_matrix, state) + next_state

    return jax.lax.associative_scan(compose, (matrices, states))


def entering_states(
    matrices: jax.Array,
    states: jax.Array,
    initial_state: jax.Array,
    continues: jax.Array | None = None,
) -> jax.Array:
    """Return the states before each of R stretches, of which the last needs no transition.

    One after another: a product of a matrix with a state costs less than one of two matrices, and
    R is small.

    Args:
        matrices: [R - 1, B, H, K, K].
        states: [R - 1, B, H, K, V].
        initial_state: [B, H, K, V], before the first stretch.
        continues: [R, B] bool or None; False where a stretch opens a run and starts from zero.

    Returns:
        [R, B, H, K, V].
    """
    if continues is None:
        continues = jnp.ones((matrices.shape[0] + 1, initial_state.shape[0]), bool)
    keep = continues[..., None, None, None]

    def step(state, stretch):
        matrix, added, keep = stretch
        state = jnp.where(keep, _product(matrix, state) + added, 0)
        return state, state

    start = jnp.where(keep[0], initial_state, 0)
    _, rest = jax.lax.scan(step, start, (matrices, states, keep[1:]))
    return jnp.concatenate([start[None], rest])


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
