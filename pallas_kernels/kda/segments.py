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
    num_rows, num_tokens = segment_ids.shape
    real = segment_ids != 0
    position = jnp.where(real, jnp.arange(num_tokens, dtype=jnp.int32), -1)
    last_real = jax.lax.cummax(position, axis=1)
    before = jnp.pad(last_real[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    id_before = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    opens_later_run = real & (before >= 0) & (segment_ids != id_before)
    return jnp.cumsum(opens_later_run, axis=1, dtype=jnp.int32), real


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


def align_runs(run, real, *, num_runs: int, chunk: int):
    """Place each of the first `num_runs` runs of a row at the start of a chunk.

    Args:
        run: [B, T] int32; real: [B, T] bool, as `number_runs` returns them.
        num_runs, chunk: static. The aligned length is T + num_runs * (chunk - 1), rounded up.

    Returns:
        (place [B, T], the aligned position of each token, the aligned length for absent tokens and
        those of later runs; token [B, aligned], the token at each position, T where there is none;
        slot [B, aligned // chunk], the run whose state each chunk continues).
    """
    num_rows, num_tokens = run.shape
    length = -(-(num_tokens + num_runs * (chunk - 1)) // chunk) * chunk
    known = real & (run < num_runs)
    one_hot = (run[..., None] == jnp.arange(num_runs)) & known[..., None]  # [B, T, N]
    chunks_per_run = -(-jnp.sum(one_hot, axis=1, dtype=jnp.int32) // chunk)  # [B, N]
    ends = jnp.cumsum(chunks_per_run, axis=1)
    starts = ends - chunks_per_run
    rank = jnp.cumsum(one_hot, axis=1, dtype=jnp.int32) - 1
    place = jnp.sum(jnp.where(one_hot, starts[:, None] * chunk + rank, 0), axis=-1)
    place = jnp.where(known, place, length)
    tokens = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), place.shape)
    rows = jnp.arange(num_rows)[:, None]
    token = jnp.full((num_rows, length), num_tokens, jnp.int32)
    token = token.at[rows, place].set(tokens, mode="drop")
    chunks = jnp.arange(length // chunk)
    slot = jnp.sum(chunks[None, :, None] >= ends[:, None, :], axis=-1, dtype=jnp.int32)
    return place, token, jnp.minimum(slot, num_runs - 1)
