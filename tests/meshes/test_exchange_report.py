"""What the report says is what rows and experts do, counted one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.exchange import exchange_report
from tests.meshes.expert_cases import routing
from tests.meshes.test_balance import reference_destinations

KINDS = ("uniform", "zipf", "same", "padding", "one_rank")
RANKS, EXPERTS, TOKENS, ROUTES, NODE = 6, 18, 9, 3, 2


@functools.cache
def reporter(**options):
    """`exchange_report`, compiled once."""
    run = functools.partial(exchange_report, **options)
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def routed(kind):
    ids = routing(kind, RANKS, EXPERTS, TOKENS, ROUTES).reshape(RANKS, TOKENS, ROUTES)
    counts = [np.bincount(i.ravel(), minlength=EXPERTS + 1)[:-1] for i in ids]
    return jnp.asarray(ids), jnp.asarray(np.stack(counts), jnp.int32)


def count_one_by_one(ids, to_rank):
    """Rows inside nodes and between them, and crossings of whole tokens between nodes."""
    fast = slow = crossings = 0
    for rank in range(RANKS):
        for token in range(TOKENS):
            targets = [int(t) for t in to_rank[rank, token] if t >= 0]
            fast += sum(t // NODE == rank // NODE and t != rank for t in targets)
            slow += sum(t // NODE != rank // NODE for t in targets)
            crossings += len({t // NODE for t in targets} - {rank // NODE})
    return fast, slow, crossings


@pytest.mark.parametrize("kind", KINDS)
def test_plain_traffic_is_counted(kind):
    ids, counts = routed(kind)
    to_rank = np.where(ids < EXPERTS, ids // (EXPERTS // RANKS), -1)
    fast, slow, crossings = count_one_by_one(ids, to_rank)
    report = reporter(mode="plain", node_size=NODE)(counts)
    assert (report.traffic.fast_rows, report.traffic.slow_rows) == (fast, slow)
    assert report.fetched_experts.sum() == report.dropped_rows == 0
    np.testing.assert_array_equal(report.home_rows, report.rank_rows)
    whole = reporter(mode="plain", node_size=NODE)(counts, ids=ids)
    assert whole.traffic.slow_rows == crossings <= slow


@pytest.mark.parametrize("kind", KINDS)
def test_balanced_traffic_is_counted(kind):
    """Without nodes in the plan the definition's destinations; with them every promise of it."""
    ids, counts = routed(kind)
    to_rank = reference_destinations(np.asarray(ids).reshape(RANKS, -1), RANKS, EXPERTS)
    fast, slow, _ = count_one_by_one(ids, to_rank.reshape(ids.shape))
    report = reporter()(counts)
    assert report.traffic.fast_rows == fast + slow and report.traffic.slow_rows == 0
    loads = np.bincount(to_rank[to_rank >= 0], minlength=RANKS)
    np.testing.assert_array_equal(report.rank_rows, loads)
    assert report.given_experts.sum() == report.fetched_experts.sum() > 0

    near = reporter(node_size=NODE)(counts, ids=ids)
    single = reporter(node_size=NODE)(counts)
    assert near.traffic.slow_rows <= single.traffic.slow_rows
    assert near.traffic.fast_rows == single.traffic.fast_rows
    assert near.rank_rows.max() - near.rank_rows.min() <= 1
    assert near.fetched_experts.max() <= EXPERTS // RANKS
    experts = near.traffic.fast_experts + near.traffic.slow_experts
    assert experts == near.fetched_experts.sum()


def test_bytes_are_rows_there_and_back_and_experts():
    counts = jnp.zeros((4, 4), jnp.int32).at[0].set(jnp.array([3, 2, 4, 1]))
    report = reporter(mode="plain", node_size=2)(counts)
    assert report.traffic.fast_rows == 2 and report.traffic.slow_rows == 5
    fast, slow = report.traffic.link_bytes(row_bytes=10, expert_bytes=1000)
    assert (fast, slow) == (40.0, 100.0)
    balanced = reporter(node_size=2)(counts)
    fast, slow = balanced.traffic.link_bytes(row_bytes=0, expert_bytes=1000)
    assert fast + slow == 1000.0 * balanced.fetched_experts.sum()
    assert reporter(mode="plain", capacity=2)(counts).dropped_rows == 3


def test_tokens_between_nodes_need_nodes():
    ids, counts = routed("uniform")
    with pytest.raises(ValueError, match="give node_size="):
        exchange_report(counts, ids=ids)
