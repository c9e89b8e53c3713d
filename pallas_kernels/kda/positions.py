"""States in the middle of a row: runs are cut into spans at the positions, each a run of its own.

A span continues the one before it unless it opens a run. The state after a number of tokens is then
what the span of the last of them leaves, and forms that keep one state per run give all of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.segments import number_runs


class Spans(NamedTuple):
    """Spans of a row in order of appearance; S = runs + positions, the most there can be."""

    segment_ids: jax.Array  # [B, T], 0 where a token is absent or of an excess run
    initial_state: jax.Array  # [B, S, H, K, V], that of the run which a span opens
    continues: jax.Array  # [B, S] bool, the span does not open a run
    excess: jax.Array  # [B, T] bool, real tokens of runs that have no state
    last_span: jax.Array  # [B, N], the last span of each run, -1 where it does not occur
    span_at: jax.Array  # [B, P], the span of the last token before each position, -1 before all


def cut_spans(
    segment_ids: jax.Array, initial_state: jax.Array, state_positions: jax.Array
) -> Spans:
    """Cut runs at the positions.

    Args:
        segment_ids: [B, T] integers.
        initial_state: [B, N, H, K, V], the state before each of the first N runs.
        state_positions: [B, P] integers that do not decrease along a row.
    """
    num_rows, num_tokens = segment_ids.shape
    num_runs, num_spans = initial_state.shape[1], initial_state.shape[1] + state_positions.shape[1]
    run, real = number_runs(segment_ids)
    known = real & (run < num_runs)
    cuts = jnp.sum(
        state_positions[:, None, :] <= jnp.arange(num_tokens)[:, None], axis=-1, dtype=jnp.int32
    )
    # Neither decreases along a row, so that their sum changes with either.
    ids = jnp.where(known, run + cuts + 1, 0)
    span = number_runs(ids)[0]

    member = (run[..., None] == jnp.arange(num_runs)) & known[..., None]  # [B, T, N]
    first_span = jnp.min(jnp.where(member, span[..., None], num_spans), axis=1)  # [B, N]
    last_span = jnp.max(jnp.where(member, span[..., None], -1), axis=1)
    opens = first_span[:, None, :] == jnp.arange(num_spans)[:, None]  # [B, S, N]
    opened = jnp.argmax(opens, axis=-1)
    is_opening = jnp.any(opens, axis=-1)
    rows = jnp.arange(num_rows)[:, None]
    initial = jnp.where(is_opening[..., None, None, None], initial_state[rows, opened], 0)

    span_after = jax.lax.cummax(jnp.where(known, span, -1), axis=1)  # after each token
    span_after = jnp.pad(span_after, ((0, 0), (1, 0)), constant_values=-1)
    at = jnp.clip(state_positions, 0, num_tokens)
    return Spans(
        segment_ids=ids,
        initial_state=initial,
        continues=~is_opening,
        excess=real & ~known,
        last_span=last_span,
        span_at=jnp.take_along_axis(span_after, at, axis=1),
    )


def gather_states(
    spans: Spans, states: jax.Array, initial_state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the state after each run [B, N, H, K, V] and at each position [B, P, H, K, V].

    Args:
        spans: as `cut_spans` returns them.
        states: [B, S, H, K, V], after each span.
        initial_state: [B, N, H, K, V], what runs that do not occur keep.
    """
    rows = jnp.arange(states.shape[0])[:, None]

    def pick(span, missing):
        occurs = (span >= 0)[..., None, None, None]
        return jnp.where(occurs, states[rows, jnp.maximum(span, 0)], missing)

    return pick(spans.last_span, initial_state), pick(spans.span_at, initial_state[:, :1])
