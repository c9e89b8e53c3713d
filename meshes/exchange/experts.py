"""Redundant experts: weights from home to the rank that computes with them, gradients back.

A home sends one contiguous range of its experts to each rank that has it as source; the ranges of
different ranks may overlap. Gradients are added at home in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp

from meshes.axes import EXPERT
from meshes.exchange.layout import Layout
from meshes.exchange.rows import Plan
from meshes.exchange.transport import check_buffer, choose_transport

# Gradients on their way home are held in slices of about so many bytes.
SLICE_BYTES = 256 * 2**20


def with_fetched_experts(weights: Any, plan: Plan) -> Any:
    """`_fetch` for every array of a tree; integers (packed codes) have no gradient."""
    if plan.mode == "plain" or plan.layout.num_ranks == 1:
        return weights

    def one(weight):
        trained = jnp.issubdtype(weight.dtype, jnp.inexact)
        return _fetch_trained(weight, plan) if trained else _fetch(weight, plan)

    return jax.tree.map(one, weights)


def _fetch(weight: jax.Array, plan: Plan) -> jax.Array:
    """Own experts [E/R, ...] to own and fetched ones [2E/R, ...]; slots not needed are zero."""
    fetch, _ = _FORMS[_form(plan.transport)]
    return jnp.concatenate([weight, fetch(weight, plan.layout)])


@jax.custom_vjp
def _fetch_trained(weight: jax.Array, plan: Plan) -> jax.Array:
    return _fetch(weight, plan)


def _forward(weight, plan):
    return _fetch(weight, plan), plan


def _backward(plan, gradient):
    _, give_back = _FORMS[_form(plan.transport)]
    own = gradient.shape[0] // 2
    with jax.named_scope("with_fetched_transpose"):
        return give_back(gradient[:own], gradient[own:], plan.layout), None


_fetch_trained.defvjp(_forward, _backward)


def _form(transport: str) -> str:
    """How experts move: rows that go through nodes leave the experts to the platform's form."""
    if transport == "hierarchical":
        return choose_transport()
    return transport


def _fetch_from_all(weight: jax.Array, layout: Layout) -> jax.Array:
    """Form `gather`: all experts to everyone."""
    check_buffer("transport='gather' of experts", layout.num_ranks * weight.nbytes)
    everything = jax.lax.all_gather(weight, EXPERT, tiled=True)  # [E, ...]
    index = _fetched_ids(layout, weight.shape[0])
    return everything.at[index].get(mode="fill", fill_value=0)


def _give_back_to_all(own: jax.Array, fetched: jax.Array, layout: Layout) -> jax.Array:
    shape = (layout.num_ranks * own.shape[0], *own.shape[1:])
    index = _fetched_ids(layout, own.shape[0])
    everything = (
        jnp.zeros(shape, jnp.float32).at[index].add(fetched.astype(jnp.float32), mode="drop")
    )
    home = jax.lax.psum_scatter(everything, EXPERT, scatter_dimension=0, tiled=True)
    return (own.astype(jnp.float32) + home).astype(own.dtype)


def _fetched_ids(layout: Layout, own: int) -> jax.Array:
    """Global id of the expert in each slot of this rank [E/R]; E in empty slots."""
    rank, slot = jax.lax.axis_index(EXPERT), jnp.arange(own)
    index = layout.source[rank] * own + layout.first_fetched[rank] + slot
    return jnp.where(slot < layout.num_fetched[rank], index, layout.num_ranks * own)


def _fetch_in_rounds(weight: jax.Array, layout: Layout) -> jax.Array:
    """Form `padded`: one expert per pair of ranks in a round, as many rounds as someone needs."""
    rank, own = jax.lax.axis_index(EXPERT), weight.shape[0]
    check_buffer("transport='padded' of experts", 2 * layout.num_ranks * weight.nbytes // own)

    def body(state):
        step, fetched = state
        index = jnp.where(_leaves(layout, rank, step), layout.first_fetched + step, own)
        send = weight.at[index].get(mode="fill", fill_value=0)  # [R, ...]
        received = jax.lax.all_to_all(send, EXPERT, 0, 0, tiled=True)
        slot = jnp.where(step < layout.num_fetched[rank], step, own)
        return step + 1, fetched.at[slot].set(received[layout.source[rank]], mode="drop")

    return _while_needed(layout, body, jnp.zeros_like(weight))


def _give_back_in_rounds(own: jax.Array, fetched: jax.Array, layout: Layout) -> jax.Array:
    rank, num_own = jax.lax.axis_index(EXPERT), own.shape[0]

    def body(state):
        step, home = state
        target = jnp.where(step < layout.num_fetched[rank], layout.source[rank], layout.num_ranks)
        send = jnp.zeros((layout.num_ranks, *own.shape[1:]), own.dtype)
        send = send.at[target].set(fetched[step], mode="drop")
        received = jax.lax.all_to_all(send, EXPERT, 0, 0, tiled=True)
        index = jnp.where(_leaves(layout, rank, step), layout.first_fetched + step, num_own)
        return step + 1, home.at[index].add(received.astype(jnp.float32), mode="drop")

    return _while_needed(layout, body, own.astype(jnp.float32)).astype(own.dtype)


def _leaves(layout: Layout, rank: jax.Array, step: jax.Array) -> jax.Array:
    """Whether this rank is the source of each rank's slot `step`, [R]."""
    return (layout.source == rank) & (step < layout.num_fetched)


def _while_needed(layout: Layout, body, value: jax.Array) -> jax.Array:
    steps = layout.num_fetched.max()
    return jax.lax.while_loop(lambda state: state[0] < steps, body, (jnp.int32(0), value))[1]


def _fetch_ragged(weight: jax.Array, layout: Layout) -> jax.Array:
    """Form `ragged`: one native all-to-all with the expert as the row."""
    there, _ = ragged_expert_vectors(layout, jax.lax.axis_index(EXPERT))
    return jax.lax.ragged_all_to_all(weight, jnp.zeros_like(weight), *there, axis_name=EXPERT)


def _give_back_ragged(own: jax.Array, fetched: jax.Array, layout: Layout) -> jax.Array:
    """Into one slot per (rank, expert) at home: neighbouring ranges share one expert at most.

    In slices of the second dimension, so that the slots take little memory.
    """
    rank, num_own = jax.lax.axis_index(EXPERT), own.shape[0]
    _, back = ragged_expert_vectors(layout, rank)
    num_slots = num_own + max(layout.num_ranks - 2, 0)
    sizes = back[3]
    starts = jnp.cumsum(sizes) - sizes
    shift = jnp.repeat(layout.first_fetched - starts, sizes, total_repeat_length=num_slots)
    slot = jnp.arange(num_slots)
    expert = jnp.where(slot < sizes.sum(), slot + shift, num_own)

    num_slices = _num_slices(own.shape, num_slots * (own.nbytes // num_own))
    width = own.shape[1] // num_slices

    def body(step, home):
        piece = jax.lax.dynamic_slice_in_dim(fetched, step * width, width, axis=1)
        slots = jnp.zeros((num_slots, *piece.shape[1:]), piece.dtype)
        slots = jax.lax.ragged_all_to_all(piece, slots, *back, axis_name=EXPERT)
        here = jax.lax.dynamic_slice_in_dim(home, step * width, width, axis=1)
        total = here.astype(jnp.float32).at[expert].add(slots.astype(jnp.float32), mode="drop")
        total = total.astype(home.dtype)
        return jax.lax.dynamic_update_slice_in_dim(home, total, step * width, axis=1)

    return jax.lax.fori_loop(0, num_slices, body, own)


def _num_slices(shape: tuple[int, ...], num_bytes: int) -> int:
    """The fewest equal slices of dimension 1 that stay below `SLICE_BYTES`, else one per entry."""
    wanted = -(-num_bytes // SLICE_BYTES)
    return next((n for n in range(wanted, shape[1]) if shape[1] % n == 0), shape[1])


def ragged_expert_vectors(layout: Layout, rank: jax.Array) -> tuple[tuple, tuple]:
    """Arguments of both ragged all-to-alls of experts: fetch and gradients.

    Returns:
        for each: input offsets, send sizes, output offsets, receive sizes, [R] each.
    """
    ranks = jnp.arange(layout.num_ranks)
    source, count = layout.source, layout.num_fetched
    to_me, from_home = source == rank, ranks == source[rank]
    nothing = jnp.zeros_like(count)
    leaving = jnp.where(to_me, count, 0)
    arriving = jnp.where(from_home, count[rank], 0)
    fetch = (jnp.where(to_me, layout.first_fetched, 0), leaving, nothing, arriving)
    # Slots at home are ordered by the rank that they come from.
    earlier = (source == source[rank]) & (ranks < rank)
    slot = jnp.where(earlier, count, 0).sum()
    back = (nothing, arriving, jnp.where(from_home, slot, 0), leaving)
    return tuple(tuple(v.astype(jnp.int32) for v in way) for way in (fetch, back))


_FORMS = {
    "gather": (_fetch_from_all, _give_back_to_all),
    "padded": (_fetch_in_rounds, _give_back_in_rounds),
    "ragged": (_fetch_ragged, _give_back_ragged),
}
