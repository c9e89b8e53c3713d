"""Transport `gather`: everything to everyone, each rank picks its rows. Small sizes and tests."""

import jax
import jax.numpy as jnp

from meshes.axes import EXPERT
from meshes.exchange.layout import Layout
from meshes.exchange.transport import check_buffer


def push(values: jax.Array, take: jax.Array, layout: Layout) -> jax.Array:
    """Rows values[take] (sent order) of all ranks to this rank's rows [M, C] (final order).

    An index in `take` that is not below len(values) stands for a row of zeros.
    """
    num_ranks, rank = layout.num_ranks, jax.lax.axis_index(EXPERT)
    check_buffer("transport='gather' of rows", num_ranks * values.nbytes)
    values = jax.lax.all_gather(values, EXPERT)  # [R, V, C]
    take = jax.lax.all_gather(take, EXPERT)  # [R, N*K]
    sizes, begin = layout.sizes[:, rank].reshape(-1), layout.begin[:, rank].reshape(-1)
    received = jnp.arange(layout.num_rows)
    piece = jnp.repeat(jnp.arange(2 * num_ranks), sizes, total_repeat_length=layout.num_rows)
    sent = received + (begin - (jnp.cumsum(sizes) - sizes))[piece]
    exists = received < sizes.sum()
    index = take.at[piece // 2, sent].get(mode="fill", fill_value=0)
    index = jnp.where(exists, index, values.shape[1])[layout.received_of_final]
    source = (piece // 2)[layout.received_of_final]
    return values.at[source, index].get(mode="fill", fill_value=0)


def pull(rows: jax.Array, layout: Layout) -> jax.Array:
    """The way back: rows [M, C] (final order) of all ranks to this rank's sent order [N*K, C]."""
    check_buffer("transport='gather' of rows", layout.num_ranks * rows.nbytes)
    rows = jax.lax.all_gather(rows, EXPERT)
    # The rank R of a row that was not sent does not exist and gives zeros.
    return rows.at[layout.rank_of_sent, layout.position_of_sent].get(mode="fill", fill_value=0)
