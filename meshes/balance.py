"""Which rank computes which rows of the routed experts: the balanced plan, and the plain one.

Rank h is home to the experts h*E/R ... (h+1)*E/R - 1. The rows of one home, in the order (expert,
source rank, token), are one sequence. The balanced plan cuts that sequence into contiguous pieces,
one per destination, the home's own piece last, so that every rank computes its target of rows:
total/R, rounded up or down. A destination takes rows of one foreign home at most, hence needs at
most the E/R experts of that home on top of its own (redundant experts).

Everything is integers of static shape, computed from the matrix of counts [source rank, expert] and
therefore the same on every rank.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RankPlan:
    """Who computes what, one entry per rank, all int32 [R].

    Rank d computes rows [cut[d], end) of its own sequence and rows [start[d], start[d] + length[d])
    of the sequence of home source[d].
    """

    source: jax.Array
    start: jax.Array
    length: jax.Array
    cut: jax.Array


def balanced_plan(counts: jax.Array, node_size: int | None = None) -> RankPlan:
    """Give every rank the same number of rows, whatever the router did.

    Each step fills the rank that lacks most from the rank that has most to spare. A filled rank is
    finished, so R - 1 steps suffice, and it has one source.

    Args:
        counts: [R, E] int32, rows of each source rank for each expert. Padding is not counted.
        node_size: ranks per node. Then a source in the node of the destination is preferred as long
            as it has as many rows to spare as are lacking, or as many as any other.

    Returns:
        the plan. Loads are floor(N/R) or ceil(N/R) for N rows in all; the larger ones go to the
        ranks whose own experts have most rows.
    """
    num_ranks = counts.shape[0]
    rows = _home_rows(counts)
    total = rows.sum()
    place = jnp.zeros_like(rows).at[jnp.argsort(-rows, stable=True)].set(jnp.arange(num_ranks))
    target = total // num_ranks + (place < total % num_ranks)
    ranks = jnp.arange(num_ranks, dtype=jnp.int32)
    node = ranks // (node_size or num_ranks)

    def fill(_, state):
        spare, plan = state  # spare: rows above the target, negative where rows are lacking
        to, best = jnp.argmin(spare), jnp.argmax(spare)
        near = jnp.argmax(jnp.where(node == node[to], spare, jnp.iinfo(jnp.int32).min))
        is_near_enough = spare[near] >= jnp.minimum(-spare[to], spare[best])
        source = jnp.where(is_near_enough, near, best).astype(jnp.int32)
        moved = jnp.where(spare[source] > 0, -spare[to], 0)
        moves = moved > 0
        plan = RankPlan(
            source=plan.source.at[to].set(jnp.where(moves, source, plan.source[to])),
            start=plan.start.at[to].set(jnp.where(moves, plan.cut[source], plan.start[to])),
            length=plan.length.at[to].add(moved),
            cut=plan.cut.at[source].add(moved),
        )
        return spare.at[to].add(moved).at[source].add(-moved), plan

    return jax.lax.fori_loop(0, num_ranks - 1, fill, (rows - target, _identity(ranks)))[1]


def plain_plan(counts: jax.Array) -> RankPlan:
    """Every row to the home of its expert."""
    return _identity(jnp.arange(counts.shape[0], dtype=jnp.int32))


def keep_within(counts: jax.Array, capacity: int) -> jax.Array:
    """Limit the rows of every home rank: the counts [R, E] that are kept.

    All pairs (source rank, expert) of one home are cut to one common level, the highest at which
    the home has at most `capacity` rows; what then remains free goes to the first pairs above the
    level. So the rows that many tokens ask for are dropped, and no source or expert before another.
    """
    num_ranks, num_experts = counts.shape
    cells = counts.reshape(num_ranks, num_ranks, -1).swapaxes(0, 1)  # [home, source, E/R]
    cells = cells.reshape(num_ranks, -1)

    def halve(_, bounds):  # kept(low) <= capacity always; high is one more than the last candidate
        low, high = bounds
        middle = low + (high - low) // 2
        fits = jnp.minimum(cells, middle[:, None]).sum(1) <= capacity
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    high = jnp.full((num_ranks,), capacity + 1, jnp.int32)
    steps = (capacity + 1).bit_length()
    level = jax.lax.fori_loop(0, steps, halve, (jnp.zeros_like(high), high))[0][:, None]
    kept = jnp.minimum(cells, level)
    above = cells > level
    kept += above & (jnp.cumsum(above, axis=1) <= capacity - kept.sum(1, keepdims=True))
    return kept.reshape(num_ranks, num_ranks, -1).swapaxes(0, 1).reshape(num_ranks, num_experts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """Where the rows of a plan lie. Part 0: rows of a rank's own experts, part 1: of fetched ones.

    "Row" is the index in the global order (expert, source rank, token).

    Attributes:
        low: [R, 2], first row of each part of every rank; `high`: one after its last.
        begin: [source, destination, part], where that part starts among the source's own rows in
            expert order.
        sizes: [source, destination, part], how many rows go there.
        expert_start: [E + 1], first row of every expert.
        block_start: [source, E], first row of each source for each expert.
        before: [source, E], rows of that source for smaller experts.
        first_fetched: [R], global id of the first fetched expert (0 if there is none).
        num_fetched: [R], how many consecutive experts are fetched.
    """

    low: jax.Array
    high: jax.Array
    begin: jax.Array
    sizes: jax.Array
    expert_start: jax.Array
    block_start: jax.Array
    before: jax.Array
    first_fetched: jax.Array
    num_fetched: jax.Array


def lay_out(counts: jax.Array, plan: RankPlan) -> Pieces:
    """Rows between every two ranks, from the counts [R, E] and the plan."""
    num_ranks, num_experts = counts.shape
    expert_start = _sums_before(counts.sum(0, dtype=jnp.int32), with_total=True)
    before = jax.vmap(_sums_before)(counts)
    block_start = expert_start[:-1] + jax.vmap(_sums_before, 1, 1)(counts)
    home_start = expert_start[:: num_experts // num_ranks]
    fetched_low = home_start[plan.source] + plan.start
    low = jnp.stack([home_start[:-1] + plan.cut, fetched_low], axis=1)
    high = jnp.stack([home_start[1:], fetched_low + plan.length], axis=1)

    def expert_of(row):
        found = jnp.searchsorted(expert_start, row, side="right", method="compare_all") - 1
        return jnp.minimum(found, num_experts - 1).astype(jnp.int32)

    def rows_before(row):  # [destination, part] -> [source, destination, part]
        expert = expert_of(row)
        return before[:, expert] + jnp.clip(row - block_start[:, expert], 0, counts[:, expert])

    begin = rows_before(low)
    fetches = plan.length > 0
    first = jnp.where(fetches, expert_of(fetched_low), 0)
    last = expert_of(high[:, 1] - 1)
    return Pieces(
        low=low,
        high=high,
        begin=begin,
        sizes=rows_before(high) - begin,
        expert_start=expert_start,
        block_start=block_start,
        before=before,
        first_fetched=first,
        num_fetched=jnp.where(fetches, last - first + 1, 0),
    )


def _home_rows(counts: jax.Array) -> jax.Array:
    """Rows for the experts of each rank, [R]."""
    return counts.sum(0, dtype=jnp.int32).reshape(counts.shape[0], -1).sum(1, dtype=jnp.int32)


def _identity(ranks: jax.Array) -> RankPlan:
    nothing = jnp.zeros_like(ranks)
    return RankPlan(source=ranks, start=nothing, length=nothing, cut=nothing)


def _sums_before(x: jax.Array, with_total: bool = False) -> jax.Array:
    """Cumulative sums of the entries before each one (and, after them, of all)."""
    sums = jnp.concatenate([jnp.zeros((1,), x.dtype), jnp.cumsum(x, dtype=x.dtype)])
    return sums if with_total else sums[:-1]
