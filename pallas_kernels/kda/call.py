"""The public call: options and checks around the chosen implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import require_int, static_float
from pallas_kernels.debug import check_segment_order
from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.kda.context import plan_context, run_in_pieces
from pallas_kernels.kda.forms import Operands, limits, run_form
from pallas_kernels.kda.gate import KDAGate
from pallas_kernels.kda.inputs import check_decay, check_inputs, check_positions
from pallas_kernels.kda.segments import check_num_segments


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
    gate: KDAGate | None = None,
    beta_logits: bool = False,
    normalize_qk: bool = False,
    state_positions: jax.Array | None = None,
    context_chunks: int | str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Run the gated delta rule over T tokens.

    Per head, with the state `S [K, V]`, for each token::

        S <- diag(exp(log_decay)) S
        S <- S + k (beta (v - S^T k))^T
        output = scale S^T q

    Computed in float32 (float64 when q, k or v are float64). Differentiable in every array, through
    all results. Tokens with segment id 0 are as if absent: output 0, state unchanged, wherever
    they stand and whatever they hold. A *run* is a maximal stretch of real tokens of one id
    (absent tokens between do not end it); the state starts anew with each run. Without rows or
    tokens (B = 0 or T = 0) the output is empty and the states are the initial ones.

    Args:
        q: [B, T, H, K], used as given unless `normalize_qk`. All arrays but the ids may be of any
            float type with "xla" and "reference"; TPU kernels take float32 and bfloat16, those of
            GPU bfloat16 for q, k and v.
        k: [B, T, H, K], likewise.
        v: [B, T, H, V].
        log_decay: [B, T, H, K], <= 0; may be as low as -inf. With `gate` raw logits.
        beta: [B, T, H], already activated unless `beta_logits`.
        scale: static; multiplies the output. None is K**-0.5.
        initial_state: [B, H, K, V], the state before the first run (later runs start at zero).
            With `num_segments` [B, num_segments, H, K, V], the state before each run. None: zeros.
        segment_ids: [B, T] integers; None is one run of real tokens.
        num_segments: static; states are kept per run, in order of appearance. A row with more runs
            is refused where the ids are concrete; under `jit` its excess tokens give NaN.
        log_decay_min: static promise that every `log_decay` is at least this; from -5 on it selects
            faster arithmetic. None is right for any decay. If the promise is broken the result is
            undefined. With `gate` it follows from its `lower_bound`.
        gate: `log_decay` holds the logits of this gate, in any float type; kernels then read
            those. Differentiable in its arrays, too.
        beta_logits: `beta` is before its sigmoid.
        normalize_qk: q and k are divided by sqrt(sum of squares + 1e-6) over K first.
        state_positions: [B, P] integers from 0 to T that do not decrease along a row. The states
            after that many tokens of the row, absent ones counted, are a third result (checkpoints
            of a prefix cache). Beside `segment_ids` it needs `num_segments` (1 where they mark
            padding).
        context_chunks: cut rows into that many pieces which run at the same time, with three times
            the work and equal results; "auto" does so where it leaves fewer cores idle
            (`plan_context` tells the number), None never. Takes neither `num_segments` nor
            `state_positions`.
        implementation: "reference" (token by token), "xla" (chunks), "mosaic_tpu", "mosaic_gpu"
            (chunks in one kernel) or None (chosen by a table).

    Returns:
        output [B, T, H, V] in v's dtype, and the state after the last real token, float32
        [B, H, K, V]; with `num_segments` the state after each run, [B, num_segments, H, K, V]. A
        run that does not occur keeps its initial state. With `state_positions` also the states
        [B, P, H, K, V] that the last real token before each position leaves; before all of them
        it is the initial state of the first run.

    Raises:
        ValueError: a shape does not fit, `log_decay_min` is positive, a row has too many runs, or
            options exclude each other. Where it is free to tell, and everywhere in debug mode
            (`pallas_kernels.debug_checks`): a decay above zero or below the promise, positions
            that decrease or are outside 0..T; in debug mode only: non-zero segment ids that
            decrease, a decay of NaN.
        TypeError: an array has the wrong kind of dtype, or a static argument is traced or no
            number of its kind.
        NotImplementedError: the named kernel does not take these arguments or this device.
    """
    check_inputs(
        q, k, v, log_decay, beta, initial_state, segment_ids, num_segments, log_decay_min, gate
    )
    scale = q.shape[-1] ** -0.5 if scale is None else static_float("kda", scale=scale)
    # In the types that jax has: numpy arrays may be float64 where it has none. Values are checked
    # as given: under `jit` numpy arrays still show theirs.
    given = log_decay
    q, k, v, log_decay, beta = map(jnp.asarray, (q, k, v, log_decay, beta))
    operands = Operands(
        q=q, k=k, v=v, log_decay=log_decay, beta=beta, gate=gate, beta_logits=beta_logits,
        normalize_qk=normalize_qk,
        log_decay_min=log_decay_min,
    )  # fmt: skip
    per_run = num_segments is not None
    num_pieces = _choose_pieces(context_chunks, q, per_run or state_positions is not None)
    chosen = choose_implementation("kda", implementation, limits(operands))
    check_positions(state_positions, *q.shape[:2], segment_ids, num_segments)
    check_num_segments(segment_ids, num_segments)
    check_segment_order("kda", segment_ids)
    if gate is None:
        check_decay("kda", given, segment_ids, log_decay_min)

    num_rows, _, num_heads, key_dim = q.shape
    if initial_state is None:
        shape = (num_rows, num_segments or 1, num_heads, key_dim, v.shape[-1])
        initial_state = jnp.zeros(shape, operands.dtype)
    elif not per_run:
        initial_state = initial_state[:, None]
    initial_state = initial_state.astype(operands.dtype)
    options = {"scale": scale, "initial_state": initial_state, "segment_ids": segment_ids}
    states = None
    with jax.named_scope("kda"):
        if q.size == 0:
            output, final_state = v, initial_state
            if state_positions is not None:
                states = jnp.repeat(initial_state[:, :1], state_positions.shape[1], axis=1)
        elif num_pieces > 1:
            output, final_state = run_in_pieces(chosen, operands, num_pieces, **options)
        else:
            output, final_state, states = run_form(
                chosen, operands, per_run=per_run, state_positions=state_positions, **options
            )
    results = (output.astype(v.dtype), final_state if per_run else final_state[:, 0])
    return results if states is None else (*results, states)


def _choose_pieces(context_chunks: int | str | None, q: jax.Array, keeps_states: bool) -> int:
    """Return the number of pieces that `context_chunks` means."""
    if context_chunks is None:
        return 1
    num_rows, num_tokens, num_heads, _ = q.shape
    if context_chunks == "auto":
        return 1 if keeps_states else plan_context(num_tokens, num_heads, num_rows)
    if not isinstance(context_chunks, str):
        require_int("kda", context_chunks=context_chunks)
    if isinstance(context_chunks, str) or context_chunks < 1:
        raise ValueError(
            f"kda: context_chunks={context_chunks!r} must be a number of at least 1, 'auto' or None"
        )
    if keeps_states:
        raise ValueError(
            f"kda: context_chunks={context_chunks} keeps no states inside of a row; leave out "
            "num_segments and state_positions, or context_chunks"
        )
    return min(context_chunks, max(num_tokens, 1))
