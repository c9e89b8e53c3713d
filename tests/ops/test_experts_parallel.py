"""Routed experts on a mesh: values and every gradient are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshes
from k3jax import ops
from k3jax.errors import UserError
from pallas_kernels import MXFP4
from tests.small_configs import quick_jit

NAMES = ("x", "weights", "gate", "up", "down")


def case(seed, routing="even", *, batch=8, tokens=12, experts=8, routes=3, width=12, hidden=10):
    """x, ids, weights, real, gate, up, down; odd counts, some experts without a row."""
    random = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)  # noqa: E731
    scores = random.standard_normal((batch, tokens, experts))
    if routing == "skewed":
        scores -= 2.0 * np.arange(experts)
    if routing == "same":
        scores = np.broadcast_to(-np.arange(experts, dtype=float), scores.shape)
    ids = np.argsort(-scores, axis=-1)[..., :routes]
    real = jnp.asarray(random.random((batch, tokens)) < 0.8)
    return (
        draw(batch, tokens, width),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(random.random((batch, tokens, routes)), jnp.float32),
        real,
        0.3 * draw(experts, width, hidden),
        0.3 * draw(experts, width, hidden),
        0.3 * draw(experts, hidden, width),
    )


def with_gradients(x, ids, weights, real, *matrices, parallel=ops.DEFAULT_PARALLEL):
    """(Result, gradients of x, weights and matrices under a fixed probe), and the load."""
    probe = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)

    def total(x, weights, *matrices):
        out, load = ops.routed_experts(
            *(x, ids, weights, real, *matrices, ops.swiglu), parallel=parallel, with_load=True
        )
        value = (out.astype(jnp.float32) * meshes.reshard(probe, meshes.spec_of(out))).sum()
        return value, (out, load)

    wanted = tuple(range(2 if isinstance(matrices[0], MXFP4) else 5))
    gradients, (out, load) = jax.grad(total, wanted, has_aux=True)(x, weights, *matrices)
    return (out, gradients), load


def on_mesh(arguments, shape: dict, *, tokens_spec=None, **parallel):
    """The same on a mesh, arguments placed as a model places them."""
    shape = meshes.MeshShape(**shape)
    mesh = meshes.build_mesh(shape, jax.devices()[: shape.num_devices])
    into, back = ("experts", "expert_latent", "ffn"), ("experts", "ffn", "expert_latent")
    if tokens_spec is None:
        along = ("context", "tensor") if shape.tensor > 1 else "context"
        tokens_spec = P(("data", "fsdp", "expert"), along)

    def place(matrix, dims):
        if isinstance(matrix, MXFP4):
            packed = (dims[0], dims[2], dims[1])
            return jax.tree.map(lambda leaf: place(leaf, packed), matrix)
        spec = meshes.AxisRules().place(dims, matrix.shape, mesh.shape)
        return jax.device_put(matrix, jax.NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        put = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, tokens_spec))
        rows = [None if a is None else put(a) for a in arguments[:4]]
        matrices = [place(m, dims) for m, dims in zip(arguments[4:], (into, into, back))]
        run = functools.partial(with_gradients, parallel=ops.Parallel(**parallel))
        return quick_jit(run)(*rows, *matrices)


@functools.cache
def one_device(*case_arguments):
    """(arguments, expected) of `case`, each computed once."""
    arguments = case(*case_arguments)
    return arguments, quick_jit(with_gradients)(*arguments)[0]


def check(found, expected, bound=1e-5):
    """Within `bound` of each tensor's largest entry."""
    leaves = zip(("out", *NAMES), jax.tree.leaves(found), jax.tree.leaves(expected))
    for name, got, want in leaves:
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error <= bound, f"{name}: {error:.2e}"


SKEWED = (4, "skewed")
SAME = (4, "same")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [{"fsdp": 2, "context": 2, "tensor": 2}, {"fsdp": 4}, {"data": 2, "tensor": 2}],
    ids=str,
)
def test_stored_pieces_and_hidden_width_equal_one_device(shape):
    arguments, expected = one_device(*SKEWED)
    found, load = on_mesh(arguments, shape)
    check(found, expected)
    assert load is None  # nothing travels


@pytest.mark.parametrize(
    "shape",
    [{"expert": 2, "tensor": 2}, pytest.param({"expert": 4}, marks=pytest.mark.slow)],
    ids=str,
)
def test_small_batches_are_read_by_every_rank(shape):
    arguments = tuple(a if i > 3 else a[:1] for i, a in enumerate(case(*SKEWED)))
    expected = quick_jit(with_gradients)(*arguments)[0]
    check(on_mesh(arguments, shape, tokens_spec=P(None, None))[0], expected)


def slow(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "shape, routing, parallel",
    [
        ({"fsdp": 2, "expert": 2}, SKEWED, {}),
        slow({"expert": 2}, SAME, {}),
        slow({"expert": 4}, SKEWED, {}),
        slow({"expert": 8}, SKEWED, {}),
        slow({"expert": 8}, SAME, {"transport": "hierarchical", "node_size": 2}),
        slow({"expert": 4}, SKEWED, {"transport": "gather", "expert_chunks": 3}),
        slow({"expert": 4, "tensor": 2}, SAME, {"expert_chunks": 2}),
        slow({"fsdp": 2, "expert": 2, "tensor": 2}, SKEWED, {}),
        slow({"data": 2, "expert": 2, "context": 2}, SKEWED, {"expert_chunks": 2}),
        slow({"fsdp": 2, "expert": 4}, SAME, {"expert_mode": "plain", "capacity_factor": 4.0}),
    ],
    ids=str,
)
def test_rows_that_travel_equal_one_device(shape, routing, parallel):
    arguments, expected = one_device(*routing)
    found, load = on_mesh(arguments, shape, **parallel)
    check(found, expected)
    check_load(load, arguments, shape["expert"], parallel)


def check_load(load, arguments, num_ranks, parallel):
    """Counted sums: rows of every rank, and what became of them."""
    ids, real = np.asarray(arguments[1]), np.asarray(arguments[3])
    experts = np.bincount(ids[real].ravel(), minlength=8)
    assert np.asarray(load.home_rows).tolist() == experts.reshape(num_ranks, -1).sum(1).tolist()
    assert int(load.rank_rows.sum()) == experts.sum()
    assert int(load.dropped_rows) == 0
    assert int(load.largest_home_rows) >= int(load.home_rows.max())
    assert float(load.fast_bytes + load.slow_bytes) > 0
    assert (float(load.slow_bytes) > 0) == ("node_size" in parallel)
    if parallel.get("expert_mode") == "plain":
        assert load.rank_rows.tolist() == load.home_rows.tolist()
        assert int(load.fetched_experts) == 0
        return
    assert int(load.fetched_experts) > 0
    before, after = load.imbalance()
    assert float(after) < min(1.2, float(before))


def test_exchanges_of_equal_rank_add_up():
    load = ops.ExchangeLoad(*(np.array(a) for a in ([6, 2], [4, 4], 6, 4, 0, 1, 8.0, 2.0)))
    twice = load + load
    assert twice.home_rows.tolist() == [12, 4]
    assert [float(x) for x in twice.imbalance()] == pytest.approx([1.5, 1.0])


@pytest.mark.slow
def test_rows_beyond_the_capacity_are_dropped_and_counted():
    """With one expert in all places a result counts the routes of its token that are left."""
    x, ids, weights, real, *matrices = case(4, "same")
    matrices = [jnp.broadcast_to(m[:1], m.shape) for m in matrices]
    arguments = (jnp.ones_like(x), ids, jnp.ones_like(weights), real, *matrices)
    (whole, _), _ = quick_jit(with_gradients)(*arguments)
    (found, gradients), load = on_mesh(
        arguments, {"expert": 4}, expert_mode="plain", capacity_factor=0.8
    )
    left = np.asarray(found / whole[0, 0])[..., 0] * ids.shape[-1]  # token [0, 0] is real
    assert real[0, 0]
    np.testing.assert_allclose(left, np.round(left), atol=1e-4)
    num_routes = int(real.sum()) * ids.shape[-1]
    capacity = int(np.ceil(0.8 * ids.size / 4))
    busy = np.minimum(np.asarray(load.home_rows), capacity)
    assert load.rank_rows.tolist() == busy.tolist()
    assert int(load.dropped_rows) == num_routes - busy.sum() > 0
    assert round(left.sum()) == busy.sum()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"expert": 4}, {"expert": 2, "tensor": 2}], ids=str)
def test_packed_experts_travel_as_they_are_stored(shape):
    x, ids, weights, real, *matrices = case(5, "skewed", width=32, hidden=64)
    packed = [MXFP4.quantize(m) for m in matrices]
    arguments = (x, ids, weights, real, *packed)
    expected = quick_jit(with_gradients)(*arguments)[0]
    check(on_mesh(arguments, shape)[0], expected)


@pytest.mark.slow
def test_bfloat16_equals_one_device_to_its_rounding():
    x, *others = case(*SKEWED)
    arguments = (x.astype(jnp.bfloat16), *others)
    expected = quick_jit(with_gradients)(*arguments)[0]
    check(on_mesh(arguments, {"expert": 2, "tensor": 2})[0], expected, bound=3e-2)


@pytest.mark.parametrize(
    "shape, changes, message",
    [
        ({"expert": 4}, {"experts": 6}, r"num_experts=6 .* 4 devices; use MeshShape\(expert=2\)"),
        ({"tensor": 4}, {"hidden": 10}, r"expert_hidden_dim=10 .* 4 devices; .*\(tensor=2\)"),
    ],
)
def test_sizes_that_do_not_divide_are_named(shape, changes, message):
    arguments = case(3, **changes)
    mesh = meshes.build_mesh(meshes.MeshShape(**shape), jax.devices()[:4])
    with jax.set_mesh(mesh), pytest.raises(UserError, match=message):
        with_gradients(*arguments)


def test_backward_pass_keeps_no_gathered_or_fetched_expert():
    """Residuals of [E, C, F] are the stored pieces: 8 experts over all devices, none twice."""
    shape = meshes.MeshShape(fsdp=2, expert=2)
    mesh = meshes.build_mesh(shape, jax.devices()[:4])
    x, ids, weights, real, *matrices = case(6, width=12, hidden=10)
    dims = ("experts", "expert_latent", "ffn"), ("experts", "ffn", "expert_latent")
    specs = [
        meshes.AxisRules().place(dims[i // 2], m.shape, mesh.shape) for i, m in enumerate(matrices)
    ]

    def residuals(x, weights, *matrices):
        run = lambda *a: ops.routed_experts(a[0], ids, a[1], real, *a[2:], ops.swiglu)  # noqa: E731
        return jax.vjp(run, x, weights, *matrices)[1]

    with jax.set_mesh(mesh):
        put = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))  # noqa: E731
        token = P(("data", "fsdp", "expert"))
        ids, real = put(ids, token), put(real, token)
        arguments = [put(x, token), put(weights, token), *map(put, matrices, specs)]
        kept = jax.tree.leaves(jax.eval_shape(residuals, *arguments))
    experts = [a.shape for a in kept if a.shape[-2:] in ((12, 10), (10, 12), (6, 10), (10, 6))]
    assert len(experts) == 3 and all(np.prod(shape) == 8 * 12 * 10 for shape in experts), experts


@pytest.mark.parametrize(
    "parallel, message",
    [
        ({"transport": "ragged"}, "transport='ragged' does not exist on CPU .*transport='padded'"),
        ({"transport": "hierarchical"}, "needs node_size="),
        ({"node_size": 3}, "node_size=3 must divide the expert axis size 4"),
    ],
)
def test_transports_that_do_not_exist_here_are_refused(parallel, message):
    with pytest.raises(UserError, match=message):
        on_mesh(case(3), {"expert": 4}, **parallel)
