"""The definition of KDA: one token after another, gradients by automatic differentiation."""

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


def kda_reference(
    q, k, v, log_decay, beta,
    *, scale, initial_state, segment_ids, per_run, state_positions=None,
):  # fmt: skip
    """Run the recurrence token by token; see `pallas_kernels.kda` for the formula.

    Args:
        q: [B, T, H, K]. It and the other arrays are of one float dtype.
        k: [B, T, H, K].
        v: [B, T, H, V].
        log_decay: [B, T, H, K].
        beta: [B, T, H].
        scale: multiplies the output.
        initial_state: [B, N, H, K, V].
        segment_ids: [B, T] integers, 0 where a token is absent; None when all are of one run.
        per_run: whether the N states belong to the first N runs, else N is 1, the state that
            enters the first run and is reset to zero by each later one.
        state_positions: [B, P] integers or None, the numbers of tokens whose states are wanted.

    Returns:
        (output [B, T, H, V], final_state [B, N, H, K, V], None or the states [B, P, H, K, V] that
        the tokens before each position leave).
    """
    num_rows, num_runs = initial_state.shape[:2]
    rows = jnp.arange(num_rows)
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)

    def step(carry, token):
        states, run, last_id = carry
        q, k, v, log_decay, beta, segment_id = token
        real = segment_id != 0
        opens_run = real & (segment_id != last_id)
        run = run + opens_run
        last_id = jnp.where(real, segment_id, last_id)
        slot = jnp.clip(run, 0, num_runs - 1) if per_run else jnp.zeros_like(run)
        state = states[rows, slot]  # [B, H, K, V]
        known = real
        if per_run:
            known = real & (run < num_runs)
        else:
            state = jnp.where(_over(opens_run & (run > 0), state), 0, state)

        decayed = jnp.exp(log_decay)[..., None] * state
        predicted = jnp.einsum("bhk,bhkv->bhv", k, decayed, precision=_HIGHEST)
        update = beta[..., None] * (v - predicted)
        new_state = decayed + k[..., :, None] * update[..., None, :]
        output = scale * jnp.einsum("bhk,bhkv->bhv", q, new_state, precision=_HIGHEST)

        missing = jnp.where(real, jnp.nan, 0).astype(output.dtype)
        output = jnp.where(_over(known, output), output, _over(missing, output))
        states = states.at[rows, slot].set(jnp.where(_over(known, state), new_state, state))
        kept = None if state_positions is None else states[rows, slot]
        return (states, run, last_id), (output, kept)

    # Absent tokens may hold anything: their inputs are replaced before use, so that neither values
    # nor gradients can pass.
    real = segment_ids != 0
    tokens = [jnp.where(_over(real, x), x, 0) for x in (q, k, v, log_decay, beta)]
    tokens = [jnp.moveaxis(x, 1, 0) for x in (*tokens, segment_ids)]
    # Before the first real token the run number is -1, and no id is the last one.
    start = (initial_state, jnp.full_like(segment_ids[:, 0], -1), jnp.zeros_like(segment_ids[:, 0]))
    (final_state, _, _), (output, kept) = jax.lax.scan(step, start, tuple(tokens))
    if state_positions is not None:
        kept = jnp.concatenate([initial_state[None, :, 0], kept])  # [T + 1, B, H, K, V]
        kept = kept[jnp.clip(state_positions, 0, q.shape[1]), rows[:, None]]
    return jnp.moveaxis(output, 0, 1), final_state, kept


def _over(flags: jax.Array, array: jax.Array) -> jax.Array:
    """Append dimensions of size 1 to `flags`, to broadcast against `array`."""
    return flags.reshape(flags.shape + (1,) * (array.ndim - flags.ndim))
