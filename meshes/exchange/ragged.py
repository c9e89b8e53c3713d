"""Transport `ragged`: one native ragged all-to-all each way (TPU and GPU).

The four vectors of both directions come from the one matrix of sizes. The output offset is a place
in the *receiver's* buffer, stated by the sender: the rows that earlier senders put there.
"""

import jax
import jax.numpy as jnp

from meshes.axes import EXPERT
from meshes.exchange.layout import Layout

Vectors = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def ragged_vectors(begin: jax.Array, sizes: jax.Array, rank: jax.Array) -> tuple[Vectors, Vectors]:
    """Arguments of both ragged all-to-alls of one rank.

    Args:
        begin: [R, R, P], where the rows of source s for part p of destination d begin at s.
        sizes: [R, R, P], how many they are.
        rank: this rank.

    Returns:
        for the way there and the way back: input offsets, send sizes, output offsets and receive
        sizes, [R*P] each. The receiver's buffer is ordered by (source, part).
    """
    arriving = sizes.swapaxes(0, 1)  # [destination, source, part]
    flat = arriving.reshape(arriving.shape[0], -1)
    offset = (jnp.cumsum(flat, axis=1) - flat).reshape(arriving.shape)  # in the receiver's buffer
    here, there = (begin[rank], sizes[rank]), (offset[rank], arriving[rank])
    push = (here[0], here[1], offset[:, rank], there[1])
    pull = (there[0], there[1], begin[:, rank], here[1])
    return tuple(tuple(v.reshape(-1).astype(jnp.int32) for v in way) for way in (push, pull))


def push(values: jax.Array, take: jax.Array, layout: Layout) -> jax.Array:
    """Rows values[take] (sent order) of all ranks to this rank's rows [M, C] (final order).

    An index in `take` that is not below len(values) stands for a row of zeros.
    """
    vectors, _ = ragged_vectors(layout.begin, layout.sizes, jax.lax.axis_index(EXPERT))
    send = values.at[take].get(mode="fill", fill_value=0)
    output = jnp.zeros((layout.num_rows, *values.shape[1:]), values.dtype)
    received = jax.lax.ragged_all_to_all(send, output, *vectors, axis_name=EXPERT)
    return received.at[layout.received_of_final].get(mode="promise_in_bounds")


def pull(rows: jax.Array, layout: Layout) -> jax.Array:
    """The way back: rows [M, C] (final order) of all ranks to this rank's sent order [N*K, C]."""
    _, vectors = ragged_vectors(layout.begin, layout.sizes, jax.lax.axis_index(EXPERT))
    send = rows.at[layout.final_of_received].get(mode="promise_in_bounds")
    output = jnp.zeros((layout.num_sent, *rows.shape[1:]), rows.dtype)
    return jax.lax.ragged_all_to_all(send, output, *vectors, axis_name=EXPERT)
