"""One long row cut into pieces that run at the same time, for devices with more cores than heads.

A piece changes the state by `S_end = M S_start + b`. A first pass finds M and b of all pieces at
once, their composition gives the state that enters each piece, and a second pass runs all pieces,
again at once, from there. That is about three times the work, spread over many more programs.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device, current_device
from pallas_kernels.kda.forms import Operands, run_form
from pallas_kernels.kda.segments import continued_runs, run_ends
from pallas_kernels.kda.transition import entering_states, run_transition

# Device name -> programs that run at the same time. Others, CPUs among them, work through the heads
# of one row as fast as through pieces of it.
_CORES = {"h200": 132, "v4": 2, "v5p": 2, "v5e": 1, "v6e": 1, "tpu7x": 1}

# Work of two passes over that of one, and tokens that a piece needs to be worth its start.
_WORK_RATIO = 3
_MIN_PIECE_TOKENS = 512


def plan_context(num_tokens: int, num_heads: int, batch: int, device: Device | None = None) -> int:
    """Return into how many pieces the rows of a call should be cut; 1 is none.

    Args:
        num_tokens: T, on this device.
        num_heads: H, on this device.
        batch: B, on this device.
        device: None is the one in force.
    """
    cores = _CORES.get((device or current_device()).name, 1)
    idle = cores // max(batch * num_heads, 1)
    pieces = min(idle, num_tokens // _MIN_PIECE_TOKENS)
    return pieces if pieces > _WORK_RATIO else 1


def run_in_pieces(
    chosen: str,
    operands: Operands,
    num_pieces: int,
    *,
    scale: float,
    initial_state: jax.Array,
    segment_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Compute what `run_form` does without per-run states, in pieces.

    Args:
        chosen: as in `run_form`.
        operands: likewise.
        num_pieces: at least 2.
        scale: as in `run_form`.
        initial_state: [B, 1, H, K, V].
        segment_ids: [B, T] or None.

    Returns:
        (output [B, T, H, V], final_state [B, 1, H, K, V]).
    """
    num_rows, num_tokens = operands.q.shape[:2]
    length = -(-num_tokens // num_pieces)
    missing = num_pieces * length - num_tokens
    if missing and segment_ids is None:
        segment_ids = jnp.ones((num_rows, num_tokens), jnp.int32)

    def cut(x):  # [B, T, ...] -> [pieces, B, length, ...]
        x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(num_rows, num_pieces, length, *x.shape[2:]), 1, 0)

    def as_rows(x):
        return x.reshape(-1, *x.shape[2:])

    pieces = operands.map_tokens(cut)
    ids = None if segment_ids is None else cut(segment_ids)
    # Nothing enters a piece after the last one.
    matrices, states = run_transition(
        chosen,
        pieces.map_tokens(lambda x: as_rows(x[:-1])),
        segment_ids=None if ids is None else as_rows(ids[:-1]),
    )
    shape = (num_pieces - 1, num_rows)
    matrices, states = (x.reshape(*shape, *x.shape[1:]) for x in (matrices, states))
    continues = None if ids is None else _continues(ids)
    entering = entering_states(matrices, states, initial_state[:, 0], continues)
    output, final, _ = run_form(
        chosen,
        pieces.map_tokens(as_rows),
        scale=scale,
        initial_state=as_rows(entering)[:, None],
        segment_ids=None if ids is None else as_rows(ids),
        per_run=False,
    )
    output = jnp.moveaxis(output.reshape(num_pieces, num_rows, *output.shape[1:]), 0, 1)
    output = output.reshape(num_rows, -1, *output.shape[3:])[:, :num_tokens]
    return output, final.reshape(num_pieces, *initial_state.shape)[-1]


def _continues(ids: jax.Array) -> jax.Array:
    """Whether the first run of each piece is the one that the pieces before it end in.

    Args:
        ids: [pieces, B, length] integers.

    Returns:
        [pieces, B] bool; True where there is nothing before, or nothing in the piece.
    """
    return continued_runs(*run_ends(ids))
