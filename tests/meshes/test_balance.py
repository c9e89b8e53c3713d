"""The balanced plan: exact loads, few redundant experts, one source, for any routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.balance import balanced_plan, keep_within, lay_out, plain_plan

KINDS = (
    "uniform",
    "zipf",
    "one_expert",
    "one_home",
    "one_source",
    "empty_ranks",
    "padding",
    "few_rows",
    "nothing",
)


def matrices(kind, batch, num_ranks, num_experts, rows, rng):
    """Counts [batch, R, E] of about `rows` rows per rank."""
    shape = (batch, num_ranks, num_experts)
    own = num_experts // num_ranks
    if kind == "few_rows":
        return rng.poisson(2 / num_experts, shape)
    if kind == "nothing":
        return np.zeros(shape, np.int64)
    chance = np.ones((batch, 1, num_experts))
    if kind == "zipf":
        power = rng.uniform(0.5, 3, (batch, 1, 1))
        chance = rng.permuted(1 / np.arange(1, num_experts + 1) ** power, axis=2)
    if kind == "one_expert":
        chance = np.eye(num_experts)[rng.integers(num_experts, size=batch)][:, None]
    if kind == "one_home":
        home = rng.integers(num_ranks, size=(batch, 1, 1))
        chance = (np.arange(num_experts) // own == home) * rng.random(shape)
    chance = chance / chance.sum(-1, keepdims=True)
    counts = rng.poisson(rows * np.broadcast_to(chance, shape))
    if kind == "one_source":
        counts *= np.arange(num_ranks)[:, None] == rng.integers(num_ranks, size=(batch, 1, 1))
    if kind == "empty_ranks":
        counts *= rng.random((batch, num_ranks, 1)) < 0.5
    if kind == "padding":
        counts = (counts * rng.random((batch, num_ranks, 1))).astype(np.int64)
    return counts


@functools.cache
def plans(node_size):
    """Compiled once per shape: counts [batch, R, E] -> plans and pieces."""

    def one(counts):
        plan = balanced_plan(counts, node_size)
        return plan, lay_out(counts, plan)

    return jax.jit(jax.vmap(one))


@functools.cache
def kept_within(capacity):
    return jax.jit(jax.vmap(lambda counts: keep_within(counts, capacity)))


def check_plans(counts, node_size=None):
    """Every promise of the plan, for counts [batch, R, E]; how many of them there were."""
    _, num_ranks, num_experts = counts.shape
    own = num_experts // num_ranks
    results = plans(node_size)(jnp.asarray(counts, jnp.int32))
    plan, pieces = jax.tree.map(np.asarray, results)
    total = counts.sum((1, 2))
    loads = pieces.sizes.sum((1, 3))
    assert (loads >= (total // num_ranks)[:, None]).all()
    assert (loads <= -(-total // num_ranks)[:, None]).all()
    # Rows are conserved: every source sends all of its rows, every piece holds what it spans.
    np.testing.assert_array_equal(pieces.sizes.sum((2, 3)), counts.sum(2))
    np.testing.assert_array_equal((pieces.high - pieces.low).sum(2), loads)
    # Pieces are disjoint and cover the sequence of all rows.
    low, high = (a.reshape(len(counts), -1) for a in (pieces.low, pieces.high))
    order = np.lexsort((high, low))
    low, high = (np.take_along_axis(a, order, 1) for a in (low, high))
    assert (low[:, 0] == 0).all() and (high[:, -1] == total).all()
    np.testing.assert_array_equal(low[:, 1:], high[:, :-1])
    # One source each, within its experts: at most E/R redundant ones.
    fetched = pieces.num_fetched
    assert fetched.max() <= own
    last = pieces.first_fetched + fetched - 1
    does = fetched > 0
    np.testing.assert_array_equal(pieces.first_fetched[does] // own, plan.source[does])
    np.testing.assert_array_equal(last[does] // own, plan.source[does])
    assert (plan.source != np.arange(num_ranks))[does].all()
    np.testing.assert_array_equal(does, plan.length > 0)
    # A home receives at most E/R + R - 2 slices of gradients.
    for home in range(num_ranks):
        assert np.where(plan.source == home, fetched, 0).sum(1).max() <= max(own + num_ranks - 2, 0)
    return len(counts)


@pytest.mark.parametrize("node_size", [None, 2])
def test_plans_are_exact(node_size):
    rng = np.random.default_rng(0)
    sets = [matrices(kind, 20, 6, 18, 50, rng) for kind in KINDS]
    assert check_plans(np.concatenate(sets), node_size) == 20 * len(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_ranks,num_experts,batch",
    [
        (2, 6, 120),
        (4, 8, 120),
        (8, 24, 120),
        (8, 896, 60),
        (16, 64, 60),
        (32, 896, 36),
        (64, 896, 40),
    ],
)
def test_ten_thousand_plans_are_exact(num_ranks, num_experts, batch):
    rng = np.random.default_rng(num_ranks + num_experts)
    checked = 0
    for node_size in (None, 2):
        for kind in KINDS:
            counts = matrices(kind, batch, num_ranks, num_experts, 16 * 512, rng)
            checked += check_plans(counts, node_size)
    assert checked == 2 * len(KINDS) * batch


def reference_destinations(ids, num_ranks, num_experts):
    """Destination of every row by the definition, with Python loops over a fill per step.

    Args:
        ids: [R, rows] expert of every row of each rank; E is padding.
        num_ranks: R.
        num_experts: E.

    Returns:
        [R, rows], the destination; -1 for padding.
    """
    own = num_experts // num_ranks
    sequences = [
        [
            (source, row)
            for expert in range(home * own, (home + 1) * own)
            for source in range(num_ranks)
            for row in np.flatnonzero(ids[source] == expert)
        ]
        for home in range(num_ranks)
    ]
    loads = [len(sequence) for sequence in sequences]
    total = sum(loads)
    by_load = sorted(range(num_ranks), key=lambda r: -loads[r])
    target = {r: total // num_ranks + (i < total % num_ranks) for i, r in enumerate(by_load)}
    result = np.full(ids.shape, -1)
    spare = [loads[r] - target[r] for r in range(num_ranks)]
    while max(spare) > 0:
        to, source = spare.index(min(spare)), spare.index(max(spare))
        lacking = -spare[to]
        moved, sequences[source] = sequences[source][:lacking], sequences[source][lacking:]
        for row in moved:
            result[row] = to
        spare[to] += lacking
        spare[source] -= lacking
    for home, sequence in enumerate(sequences):
        for row in sequence:
            result[row] = home
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_the_definition(kind):
    num_ranks, num_experts, rows = 5, 15, 13
    rng = np.random.default_rng(3)
    counts = matrices(kind, 1, num_ranks, num_experts, rows, rng)[0]
    length = max(1, counts.sum(1).max())
    ids = np.full((num_ranks, length), num_experts)
    for rank in range(num_ranks):
        chosen = np.repeat(np.arange(num_experts), counts[rank])
        ids[rank, : len(chosen)] = rng.permutation(chosen)
    destination = reference_destinations(ids, num_ranks, num_experts)
    expected = [np.bincount(d[d >= 0], minlength=num_ranks) for d in destination]
    _, pieces = plans(None)(jnp.asarray(counts, jnp.int32)[None])
    np.testing.assert_array_equal(pieces.sizes[0].sum(2), expected)


def test_sources_of_the_same_node_are_preferred():
    """Rank 3 lacks most (5 rows); rank 0 has 8 to spare, rank 2 of its own node has 5."""
    counts = np.zeros((1, 6, 6), np.int32)
    counts[0, 0] = [18, 6, 15, 5, 6, 10]
    (plain, _), (near, _) = (plans(size)(jnp.asarray(counts)) for size in (None, 2))
    assert (plain.source[0, 3], near.source[0, 3]) == (0, 2)
    assert (near.source[0, 1], near.source[0, 4]) == (0, 0)
    check_plans(counts, 2)
    counts[0, 0, [2, 5]] = 14, 11  # four to spare are too few for five
    (few, _) = plans(2)(jnp.asarray(counts))
    assert few.source[0, 3] == 0


def test_plain_plan_moves_nothing():
    counts = jnp.asarray(matrices("zipf", 1, 4, 8, 20, np.random.default_rng(1))[0], jnp.int32)
    pieces = jax.jit(lambda c: lay_out(c, plain_plan(c)))(counts)
    np.testing.assert_array_equal(pieces.sizes[..., 0], counts.reshape(4, 4, 2).sum(2))
    assert pieces.sizes[..., 1].sum() == 0 and pieces.num_fetched.sum() == 0


def test_capacity_cuts_the_largest_pairs_to_one_level():
    counts = jnp.array([[7, 1, 0, 2], [3, 0, 5, 5]], jnp.int32)  # two ranks, two experts each
    few = kept_within(8)(counts[None])[0]
    np.testing.assert_array_equal(few, [[4, 1, 0, 2], [3, 0, 3, 3]])
    np.testing.assert_array_equal(kept_within(12)(counts[None])[0], counts)


@pytest.mark.parametrize("kind", KINDS)
def test_capacity_is_used_up_before_anything_is_dropped(kind):
    rng = np.random.default_rng(5)
    counts = matrices(kind, 10, 4, 12, 40, rng)
    for capacity in (1, 25, 41, 1000):
        few = np.asarray(kept_within(capacity)(jnp.asarray(counts, jnp.int32)))
        assert (few >= 0).all() and (few <= counts).all()
        rows, wanted = (c.reshape(10, 4, 4, 3).sum((1, 3)) for c in (few, counts))
        np.testing.assert_array_equal(rows, np.minimum(wanted, capacity))
