"""Runs of real tokens: which run each token belongs to, and runs laid out on chunk boundaries."""

import jax
import jax.numpy as jnp
import numpy as np


def number_runs(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Number the runs of real tokens of each row in order of appearance.

    A run ends where the id of the next *real* token differs; absent tokens (id 0) belong to the run
    before them, those before the first real token to run 0.

    Args:
        segment_ids: [B, T] integers.

    Returns:
        (run [B, T] int32, real [B, T] bool).
    """
    num_tokens = segment_ids.shape[1]
    real = segment_ids != 0
    position = jnp.where(real, jnp.arange(num_tokens, dtype=jnp.int32), -1)
    last_real = jax.lax.cummax(position, axis=1)
    before = jnp.pad(last_real[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    id_before = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    opens_later_run = real & (before >= 0) & (segment_ids != id_before)
    return jnp.cumsum(opens_later_run, axis=1, dtype=jnp.int32), real


def run_ends(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a stretch of tokens shows to those beside it.

    Args:
        ids: [..., T] integers, at least one token.

    Returns:
        (whether it has real tokens, the id of the first and of the last of them), all [...].
    """
    real = ids != 0
    take = lambda at: jnp.take_along_axis(ids, at[..., None], axis=-1)[..., 0]  # noqa: E731
    last = ids.shape[-1] - 1 - jnp.argmax(real[..., ::-1], axis=-1)
    return jnp.any(real, axis=-1), take(jnp.argmax(real, axis=-1)), take(last)


def continued_runs(has_tokens: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """Whether the first run of each of R consecutive stretches is the one that ends before it.

    Args:
        has_tokens: [R, B] bool, as `run_ends` returns them.
        first: [R, B] integers, likewise.
        last: [R, B] integers, likewise.

    Returns:
        [R, B] bool; True where there is nothing before, or nothing in the stretch.
    """

    def step(id_before, stretch):
        has_tokens, first, last = stretch
        continues = ~has_tokens | (id_before == 0) | (first == id_before)
        return jnp.where(has_tokens, last, id_before), continues

    return jax.lax.scan(step, jnp.zeros_like(first[0]), (has_tokens, first, last))[1]


def check_num_segments(segment_ids: jax.Array | None, num_segments: int | None) -> None:
    """Raise ValueError when concrete ids have a row with more than `num_segments` runs."""
    if segment_ids is None or num_segments is None or isinstance(segment_ids, jax.core.Tracer):
        return
    # In numpy: concrete ids may be captured by a function that is being traced.
    rows = [row[row != 0] for row in np.asarray(segment_ids)]
    most = max((1 + np.count_nonzero(row[1:] != row[:-1]) for row in rows if row.size), default=0)
    if most > num_segments:
        raise ValueError(
            f"kda: a row of segment_ids has {most} runs of real tokens, more than "
            f"num_segments={num_segments}; raise num_segments"
        )


def align_runs(run, real, *, num_runs: int, multiple: int):
    """Place each of the first `num_runs` runs of a row at a multiple of `multiple`.

    Args:
        run: [B, T] int32, as `number_runs` returns it.
        real: [B, T] bool, likewise.
        num_runs: static.
        multiple: static. The aligned length M is T + num_runs * (multiple - 1), rounded up.

    Returns:
        (place [B, T], the aligned position of each token, M for absent tokens and those of later
        runs; token [B, M], the token at each position, T where there is none; slot
        [B, M // multiple], the run that each stretch belongs to).
    """
    num_rows, num_tokens = run.shape
    length = -(-(num_tokens + num_runs * (multiple - 1)) // multiple) * multiple
    known = real & (run < num_runs)
    member = (run[..., None] == jnp.arange(num_runs)) & known[..., None]  # [B, T, N]
    ends = jnp.cumsum(-(-jnp.sum(member, axis=1, dtype=jnp.int32) // multiple), axis=1)  # [B, N]
    starts = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
    rank = jnp.cumsum(member, axis=1, dtype=jnp.int32) - 1
    place = jnp.sum(jnp.where(member, starts[:, None] * multiple + rank, 0), axis=-1)
    place = jnp.where(known, place, length)
    tokens = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), place.shape)
    token = jnp.full((num_rows, length), num_tokens, jnp.int32)
    token = token.at[jnp.arange(num_rows)[:, None], place].set(tokens, mode="drop")
    stretch = jnp.arange(length // multiple)[None, :, None]
    slot = jnp.sum(stretch >= ends[:, None, :], axis=-1, dtype=jnp.int32)
    return place, token, jnp.minimum(slot, num_runs - 1)
