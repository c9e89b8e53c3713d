"""Dispatch, redundant experts and collect against a dense product, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshes
from meshes.balance import keep_within
from meshes.exchange import transport as transports
from tests.meshes.expert_cases import KINDS, check_against_dense, expert_mesh, routing

slow = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "num_ranks,num_experts,transport,node_size",
    [
        (4, 8, "padded", None),
        (4, 8, "hierarchical", 2),
        pytest.param(2, 6, "padded", None, marks=slow),
        pytest.param(8, 24, "padded", 2, marks=slow),
        pytest.param(2, 6, "gather", None, marks=slow),
        pytest.param(8, 24, "gather", None, marks=slow),
        pytest.param(8, 24, "hierarchical", 2, marks=slow),
        pytest.param(8, 24, "hierarchical", 4, marks=slow),
        pytest.param(4, 8, "hierarchical", 1, marks=slow),
        pytest.param(4, 8, "hierarchical", 4, marks=slow),
    ],
)
def test_balanced_equals_dense(num_ranks, num_experts, transport, node_size, kind):
    ids = routing(kind, num_ranks, num_experts)
    sizes = check_against_dense(
        num_ranks, num_experts, ids, transport=transport, node_size=node_size
    )
    loads = sizes.sum(1)
    assert loads.max() - loads.min() <= 1


def kept_routes(ids, num_ranks, num_experts, capacity):
    """The ids with E for each route that the rule of `keep_within` drops."""
    kept = ids.reshape(num_ranks, -1).copy()
    counts = np.stack([np.bincount(i, minlength=num_experts + 1)[:-1] for i in kept])
    room = np.asarray(keep_within(jnp.asarray(counts, jnp.int32), capacity))
    for rank in range(num_ranks):
        for expert in range(num_experts):
            routes = np.flatnonzero(kept[rank] == expert)
            kept[rank, routes[room[rank, expert] :]] = num_experts
    return kept.reshape(ids.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "num_ranks,num_experts,transport,node_size,capacity_factor",
    [
        (4, 8, "padded", None, 0.9),
        pytest.param(4, 8, "gather", None, 4.0, marks=slow),
        pytest.param(8, 24, "padded", None, 8.0, marks=slow),
        pytest.param(8, 24, "hierarchical", 4, 8.0, marks=slow),
        pytest.param(8, 24, "hierarchical", 2, 0.4, marks=slow),
    ],
)
def test_plain_equals_dense_without_the_dropped(
    num_ranks, num_experts, transport, node_size, capacity_factor, kind
):
    ids = routing(kind, num_ranks, num_experts)
    capacity = int(np.ceil(capacity_factor * ids.size / num_ranks))
    kept = kept_routes(ids, num_ranks, num_experts, capacity)
    options = {"transport": transport, "node_size": node_size, "capacity_factor": capacity_factor}
    sizes = check_against_dense(num_ranks, num_experts, ids, kept, mode="plain", **options)
    assert sizes.shape == (num_ranks, num_experts // num_ranks)
    assert sizes.sum(1).max() <= capacity
    if capacity_factor < 1 and kind in ("uniform", "zipf", "same"):
        assert (kept != ids).any()
    if capacity_factor == num_ranks:
        assert (kept == ids).all()


@pytest.mark.parametrize("mode", ["balanced", "plain"])
@pytest.mark.parametrize("num_ranks", [None, 1])
def test_one_rank_sorts_at_home(num_ranks, mode):
    ids = routing("padding", 1, 5)
    sizes = check_against_dense(num_ranks, 5, ids, mode=mode)
    np.testing.assert_array_equal(sizes[0], np.bincount(ids.ravel(), minlength=6)[:5])


@slow
@pytest.mark.parametrize("transport,node_size", [("padded", None), ("hierarchical", 2)])
def test_groups_of_another_axis_take_as_many_rounds_as_they_need(transport, node_size):
    """Two groups of four ranks: one has to move everything, the other next to nothing."""
    ids = np.concatenate([routing("same", 4, 8), routing("one_rank", 4, 8)])
    options = {"transport": transport, "node_size": node_size, "data": 2}
    check_against_dense(4, 8, ids, early_counts=True, **options)
    check_against_dense(4, 8, ids[::-1], early_counts=True, **options)


@slow
@pytest.mark.parametrize("transport,node_size", [("padded", None), ("hierarchical", 2)])
def test_bfloat16_is_added_in_float32(transport, node_size):
    ids = routing("zipf", 4, 8)
    options = {"transport": transport, "node_size": node_size}
    check_against_dense(4, 8, ids, dtype="bfloat16", **options)


def dispatched(num_experts=8, tokens=4, width=3, num_ranks=4, dtype=jnp.float32, **options):
    """Shapes of a dispatch and of fetched experts, nothing runs."""
    with jax.set_mesh(expert_mesh(num_ranks)):
        return traced(num_experts, tokens, width, num_ranks, dtype, **options)


def traced(num_experts, tokens, width, num_ranks, dtype, **options):

    def local(x, ids, weight):
        d = meshes.dispatch(x, ids, num_experts=num_experts, **options)
        return d.rows, meshes.with_fetched(weight, d)

    spec = P("expert")
    return jax.eval_shape(
        meshes.per_device(local, (spec,) * 3, spec),
        jax.ShapeDtypeStruct((num_ranks * tokens, width), dtype),
        jax.ShapeDtypeStruct((num_ranks * tokens, 2), jnp.int32),
        jax.ShapeDtypeStruct((2 * num_ranks, width, width), dtype),
    )


@pytest.mark.parametrize(
    "options,message",
    [
        ({"transport": "rdma"}, "transport='rdma' is unknown; use one of ragged, padded"),
        ({"mode": "random"}, "expert mode 'random' is unknown; use one of balanced, plain"),
        ({"transport": "ragged"}, "does not exist on CPU .*use transport='padded'"),
        ({"transport": "hierarchical"}, "needs node_size="),
        ({"node_size": 3}, "node_size=3 must divide the expert axis size 4"),
        (
            {"num_experts": 6},
            "num_experts=6 must be divisible by the expert axis size 4",
        ),
        ({"capacity_factor": 0.0, "mode": "plain"}, "capacity_factor=0.0 must be positive"),
        ({"tokens": 2**29}, "more than 2\\*\\*31 rows; use more chunks"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_runs(options, message):
    with pytest.raises(ValueError, match=message):
        dispatched(**options)


def test_forms_that_would_not_fit_memory_are_refused(monkeypatch):
    """In GiB: 4 ranks of 300000 tokens of 512 numbers; 4 pairs of experts of 12000 squared."""
    message = r"of rows would hold 2\.29 GiB .* more than the 2\.00 GiB .*use transport='ragged'"
    with pytest.raises(ValueError, match=message):
        dispatched(tokens=300_000, width=512, transport="gather")
    with pytest.raises(ValueError, match=r"'padded' of experts would hold 4\.29 GiB"):
        dispatched(width=12_000, transport="padded")
    with pytest.raises(ValueError, match=r"'gather' of experts would hold 4\.29 GiB"):
        dispatched(width=12_000, transport="gather")
    rows, held = dispatched(tokens=5, transport="padded")
    assert rows.shape == (4 * 10, 3) and held.shape == (16, 3, 3)


def test_transport_follows_the_platform():
    assert meshes.choose_transport("cpu") == "padded"
    assert meshes.choose_transport("tpu") == meshes.choose_transport("cuda") == "ragged"
    assert meshes.choose_transport() == "padded"
    assert transports.current_platform() == "cpu"
    with jax.set_mesh(expert_mesh(2)):
        assert transports.current_platform() == "cpu"


def test_programs_for_machines_without_a_name_may_ask_for_ragged():
    mesh = meshes.abstract_mesh(meshes.MeshShape(expert=4))
    with jax.sharding.use_abstract_mesh(mesh):
        rows, held = traced(8, 5, 3, 4, jnp.bfloat16, transport="ragged")
        assert transports.current_platform() is None
        assert meshes.choose_transport() == "padded"
    assert rows.shape == (4 * 10, 3) and held.shape == (16, 3, 3)
