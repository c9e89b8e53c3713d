"""Transport `hierarchical`: a token crosses to another node once, whatever it has to do there.

Rank r is number l = r % L of node v = r // L. On the way there a token goes from (v, l) to the rank
with the same l in every node that has one of its experts, and that rank passes it on inside the
node. On the way back the rank with the same l adds up, in float32, what the ranks of its node
computed for a token, and one row crosses to the token's home. Both steps are all-to-alls in groups
of the one expert axis, in rounds of fixed capacity as in `padded`. Where a token's rows lie travels
with it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from meshes.axes import EXPERT
from meshes.exchange.layout import Layout
from meshes.exchange.padded import ROOM
from meshes.sort import stable_order


@dataclasses.dataclass(frozen=True)
class _Nodes:
    """Who meets whom, and which tokens go where.

    Attributes:
        node_size: L ranks in a node.
        num_nodes: V.
        tokens: [V, N], the tokens that go to each node, in order, then all others.
        count: [V], how many go.
        place: [N, K], l*M + final position of each route in its node; -1 for a route not sent.
        node: [N, K], node of each route.
        num_rows: M.
    """

    node_size: int
    num_nodes: int
    tokens: jax.Array
    count: jax.Array
    place: jax.Array
    node: jax.Array
    num_rows: int

    @property
    def capacity(self) -> int:
        """Tokens from one rank to one node in a round."""
        num_tokens, routes = self.place.shape
        mean = -(-num_tokens * min(routes, self.num_nodes) // self.num_nodes)
        return max(1, min(num_tokens, ROOM * mean))

    @property
    def rounds(self) -> jax.Array:
        return _agree(-(-self.count.max() // self.capacity))

    def across(self, x: jax.Array) -> jax.Array:
        """Exchange [V, ...] with the ranks of the same number in all nodes."""
        size, num = self.node_size, self.num_nodes
        groups = [[node * size + local for node in range(num)] for local in range(size)]
        return jax.lax.all_to_all(x, EXPERT, 0, 0, axis_index_groups=groups, tiled=True)

    def inside(self, x: jax.Array) -> jax.Array:
        """Exchange [L, ...] with the ranks of this node."""
        size, num = self.node_size, self.num_nodes
        groups = [[node * size + local for local in range(size)] for node in range(num)]
        return jax.lax.all_to_all(x, EXPERT, 0, 0, axis_index_groups=groups, tiled=True)

    def leaving(self, step: jax.Array) -> jax.Array:
        """Tokens that leave for each node in a round, [V, capacity]; N in empty slots."""
        slot = step * self.capacity + jnp.arange(self.capacity)
        tokens = self.tokens.at[:, slot].get(mode="clip")
        return jnp.where(slot < self.count[:, None], tokens, self.place.shape[0])

    def places(self, tokens: jax.Array) -> jax.Array:
        """Places of those tokens' routes in the node that they go to, [V, capacity, K]."""
        place = self.place.at[tokens].get(mode="fill", fill_value=-1)
        node = self.node.at[tokens].get(mode="fill", fill_value=-1)
        return jnp.where(node == jnp.arange(self.num_nodes)[:, None, None], place, -1)


@dataclasses.dataclass(frozen=True)
class _Visitors:
    """The tokens of one round inside a node: T = V * capacity, their K places flattened to [T*K].

    Attributes:
        place: [T*K], l*M + final position; -1 where nothing goes.
        order: [T*K], the places by l.
        start: [L], where those of each l begin in that order; `count`: how many.
        capacity: places of one l in a round.
    """

    nodes: _Nodes
    place: jax.Array
    order: jax.Array
    start: jax.Array
    count: jax.Array
    capacity: int

    @property
    def rounds(self) -> jax.Array:
        return _agree(-(-self.count.max() // self.capacity))

    def slots(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Index of each slot into the places (T*K if empty) and its final position (M if empty)."""
        num_rows = self.nodes.num_rows
        slot = step * self.capacity + jnp.arange(self.capacity)
        index = self.order.at[self.start[:, None] + slot].get(mode="clip")
        index = jnp.where(slot < self.count[:, None], index, self.place.size)  # [L, capacity]
        place = self.place.at[index].get(mode="fill", fill_value=-1)
        return index, jnp.where(place < 0, num_rows, place % num_rows)


def spread(x: jax.Array, layout: Layout, node_size: int) -> jax.Array:
    """Tokens x [N, C] to the rows [M, C] of this rank; rows that nobody sent are zero."""
    nodes = _nodes(layout, node_size)
    routes = nodes.place.shape[1]

    def between(state):
        step, rows = state
        tokens = nodes.leaving(step)
        arrived = nodes.across(x.at[tokens].get(mode="fill", fill_value=0))
        arrived = arrived.reshape(-1, x.shape[1])
        visitors = _visitors(nodes, nodes.across(nodes.places(tokens)))

        def inside(state):
            step, rows = state
            index, final = visitors.slots(step)
            send = arrived.at[index // routes].get(mode="fill", fill_value=0)
            final = nodes.inside(final)
            return step + 1, rows.at[final].set(nodes.inside(send), mode="drop")

        return step + 1, _loop(visitors.rounds, inside, rows)

    rows = jnp.zeros((layout.num_rows, x.shape[1]), x.dtype)
    return _loop(nodes.rounds, between, rows)


def gather_sum(
    rows: jax.Array, weights: jax.Array | None, layout: Layout, node_size: int
) -> jax.Array:
    """Sum over the routes of each token: [M, C], [N, K] or None (ones) -> [N, C].

    Added in float32 in each node; one row per node in the type of `rows` crosses and is added in
    float32 at home.
    """
    nodes = _nodes(layout, node_size)
    num_tokens, routes = nodes.place.shape
    width = rows.shape[1]

    def between(state):
        step, total = state
        tokens = nodes.leaving(step)
        visitors = _visitors(nodes, nodes.across(nodes.places(tokens)))
        if weights is None:
            weight = jnp.ones(visitors.place.shape, jnp.float32)
        else:
            weight = nodes.across(weights.at[tokens].get(mode="fill", fill_value=0)).reshape(-1)

        def inside(state):
            step, node_sum = state
            index, final = visitors.slots(step)
            answer = rows.at[nodes.inside(final)].get(mode="fill", fill_value=0)
            answer = nodes.inside(answer).astype(jnp.float32)
            answer = answer * weight.at[index].get(mode="fill", fill_value=0)[..., None]
            return step + 1, node_sum.at[index // routes].add(answer, mode="drop")

        node_sum = jnp.zeros((visitors.place.size // routes, width), jnp.float32)
        node_sum = _loop(visitors.rounds, inside, node_sum).astype(rows.dtype)
        back = nodes.across(node_sum.reshape(*tokens.shape, width))
        return step + 1, total.at[tokens].add(back.astype(jnp.float32), mode="drop")

    total = jnp.zeros((num_tokens, width), jnp.float32)
    return _loop(nodes.rounds, between, total).astype(rows.dtype)


def _nodes(layout: Layout, node_size: int) -> _Nodes:
    num_ranks, num_rows = layout.num_ranks, layout.num_rows
    num_nodes = num_ranks // node_size
    rank = layout.rank_of_route
    final = layout.position_of_sent.at[layout.sent_of_route].get(mode="fill", fill_value=0)
    is_sent = rank >= 0
    node = jnp.where(is_sent, rank // node_size, -1)
    goes = (node[..., None] == jnp.arange(num_nodes)).any(1)  # [N, V]
    return _Nodes(
        node_size=node_size,
        num_nodes=num_nodes,
        tokens=stable_order(~goes.T, 1),
        count=goes.sum(0, dtype=jnp.int32),
        place=jnp.where(is_sent, rank % node_size * num_rows + final, -1),
        node=node,
        num_rows=num_rows,
    )


def _visitors(nodes: _Nodes, places: jax.Array) -> _Visitors:
    """Sort the places [V, capacity, K] that arrived by the rank of this node that they are on."""
    place = places.reshape(-1)
    local = jnp.where(place < 0, nodes.node_size, place // nodes.num_rows)
    count = (local[:, None] == jnp.arange(nodes.node_size)).sum(0, dtype=jnp.int32)
    capacity = -(-ROOM * nodes.capacity * places.shape[-1] // nodes.node_size)
    return _Visitors(
        nodes=nodes,
        place=place,
        order=stable_order(local, nodes.node_size),
        start=jnp.cumsum(count) - count,
        count=count,
        capacity=max(1, min(place.size, capacity)),
    )


def _agree(rounds: jax.Array) -> jax.Array:
    """As many rounds as any rank needs: all take part in every collective."""
    return jax.lax.pmax(rounds, EXPERT)


def _loop(rounds: jax.Array, body, value: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda state: state[0] < rounds, body, (jnp.int32(0), value))[1]
