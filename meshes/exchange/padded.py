"""Transport `padded`: rounds of all-to-all of fixed capacity, as many as the fullest pair needs.

Exact for any skew without a buffer for the worst case. All ranks know the whole matrix of sizes, so
they agree on the number of rounds without asking.
"""

import jax
import jax.numpy as jnp

from meshes.axes import EXPERT
from meshes.exchange.layout import Layout

# Room of one round for a pair of ranks, in mean rows per pair.
ROOM = 2


def push(values: jax.Array, take: jax.Array, layout: Layout) -> jax.Array:
    """Rows values[take] (sent order) of all ranks to this rank's rows [M, C] (final order).

    An index in `take` that is not below len(values) stands for a row of zeros.
    """
    capacity, rounds = _rounds(layout)

    def body(state):
        step, rows = state
        sent, final = _slots(layout, step, capacity)
        index = take.at[sent].get(mode="fill", fill_value=values.shape[0])
        send = values.at[index].get(mode="fill", fill_value=0)
        received = jax.lax.all_to_all(send, EXPERT, 0, 0, tiled=True)
        return step + 1, rows.at[final].set(received, mode="drop")

    rows = jnp.zeros((layout.num_rows, *values.shape[1:]), values.dtype)
    return jax.lax.while_loop(lambda state: state[0] < rounds, body, (jnp.int32(0), rows))[1]


def pull(rows: jax.Array, layout: Layout) -> jax.Array:
    """The way back: rows [M, C] (final order) of all ranks to this rank's sent order [N*K, C]."""
    capacity, rounds = _rounds(layout)

    def body(state):
        step, back = state
        sent, final = _slots(layout, step, capacity)
        send = rows.at[final].get(mode="fill", fill_value=0)
        received = jax.lax.all_to_all(send, EXPERT, 0, 0, tiled=True)
        return step + 1, back.at[sent].set(received, mode="drop")

    back = jnp.zeros((layout.num_sent, *rows.shape[1:]), rows.dtype)
    return jax.lax.while_loop(lambda state: state[0] < rounds, body, (jnp.int32(0), back))[1]


def _rounds(layout: Layout) -> tuple[int, jax.Array]:
    """Capacity of a round and the number of rounds."""
    capacity = max(1, -(-ROOM * layout.num_sent // layout.num_ranks))
    return capacity, -(-layout.sizes.sum(2).max() // capacity)


def _slots(layout: Layout, step: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """What a round moves, [R, capacity] each.

    Returns:
        sent: index in sent order of each slot to each destination; N*K where the slot is empty.
        final: final position of each slot from each source; M where the slot is empty.
    """
    rank = jax.lax.axis_index(EXPERT)
    slot = step * capacity + jnp.arange(capacity, dtype=jnp.int32)
    sizes, begin = layout.sizes[rank], layout.begin[rank]  # [destination, part]
    is_own = slot < sizes[:, :1]
    sent = jnp.where(is_own, begin[:, :1] + slot, begin[:, 1:] + slot - sizes[:, :1])
    sent = jnp.where(slot < sizes.sum(1, keepdims=True), sent, layout.num_sent)
    arriving = layout.sizes[:, rank].sum(1, keepdims=True)  # [source, 1]
    received = jnp.cumsum(arriving, axis=0) - arriving + slot
    final = layout.final_of_received.at[received].get(mode="clip")
    return sent, jnp.where(slot < arriving, final, layout.num_rows)
