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

NAMES = ("x", "weights", "gate", "up", "down")


def case(seed=0, *, batch=8, tokens=12, experts=8, routes=3, width=12, hidden=10, routing="even"):
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
    """Result, and gradients of x, weights and the matrices under a fixed probe."""
    probe = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)

    def total(x, weights, *matrices):
        out = ops.routed_experts(x, ids, weights, real, *matrices, ops.swiglu, parallel=parallel)
        return (out * meshes.reshard(probe, meshes.spec_of(out))).sum(), out

    wanted = tuple(range(2 if isinstance(matrices[0], MXFP4) else 5))
    gradients, out = jax.grad(total, wanted, has_aux=True)(x, weights, *matrices)
    return out, gradients


def on_mesh(arguments, shape: meshes.MeshShape, *, tokens_spec=None, parallel, run=None):
    """The same on a mesh, arguments placed as a model places them."""
    devices = jax.devices()[: shape.num_devices]
    mesh = meshes.build_mesh(shape, devices)
    rules = meshes.AxisRules()
    names = ("experts", "expert_latent", "ffn"), ("experts", "ffn", "expert_latent")
    token = tokens_spec or P(
        ("data", "fsdp", "expert"), ("context", "tensor") if shape.tensor > 1 else "context"
    )

    def put(leaf, spec):
        return jax.device_put(leaf, jax.NamedSharding(mesh, spec))

    def place(matrix, dims):
        if isinstance(matrix, MXFP4):
            packed = (dims[0], dims[2], dims[1])
            return jax.tree.map(lambda leaf: place(leaf, packed), matrix)
        return put(matrix, rules.place(dims, matrix.shape, mesh.shape))

    with jax.set_mesh(mesh):
        rows = [a if a is None else put(a, token) for a in arguments[:4]]
        matrices = [place(m, names[i // 2]) for i, m in enumerate(arguments[4:])]
        function = run or with_gradients
        return jax.jit(functools.partial(function, parallel=parallel))(*rows, *matrices)


def check(found, expected):
    """Within 1e-5 of each tensor's largest entry."""
    leaves = zip(("out", *NAMES), jax.tree.leaves(found), jax.tree.leaves(expected))
    for name, got, want in leaves:
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error <= 1e-5, f"{name}: {error:.2e}"


def reference(arguments):
    return jax.jit(with_gradients)(*arguments)


@pytest.mark.parametrize(
    "shape",
    [
        {"fsdp": 4},
        {"data": 2, "tensor": 2},
        {"fsdp": 2, "context": 2, "tensor": 2},
    ],
    ids=str,
)
def test_stored_pieces_and_hidden_width_equal_one_device(shape):
    arguments = case(1)
    found = on_mesh(arguments, meshes.MeshShape(**shape), parallel=ops.Parallel())
    check(found, reference(arguments))


@pytest.mark.parametrize("shape", [{"expert": 4}, {"expert": 2, "tensor": 2}], ids=str)
def test_small_batches_are_read_by_every_rank(shape):
    arguments = case(2, batch=1)
    found = on_mesh(
        arguments, meshes.MeshShape(**shape), tokens_spec=P(None, None), parallel=ops.Parallel()
    )
    check(found, reference(arguments))


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


@pytest.mark.parametrize("routing", ["skewed", "same"])
@pytest.mark.parametrize("shape", [{"expert": 4}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
def test_exchanged_rows_equal_one_device(shape, routing):
    arguments = case(4, routing=routing)
    parallel = ops.Parallel(transport="gather" if routing == "same" else None)
    found = on_mesh(arguments, meshes.MeshShape(**shape), parallel=parallel)
    check(found, reference(arguments))
