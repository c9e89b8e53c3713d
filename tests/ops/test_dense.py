"""Projections and table lookups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshes
from k3jax import ops
from tests.tolerances import assert_close


def test_embedding_of_a_wrong_id_is_nan():
    table = jnp.arange(12.0).reshape(4, 3)
    tokens = jnp.array([[0, 3, -1], [4, 2**31 - 1, 1]])
    rows = ops.embed(table, tokens)
    np.testing.assert_array_equal(rows[0, :2], table[jnp.array([0, 3])])
    np.testing.assert_array_equal(rows[1, 2], table[1])
    assert np.isnan(rows[0, 2]).all()
    assert np.isnan(rows[1, :2]).all()
    assert np.isnan(ops.embed(table.astype(jnp.bfloat16), tokens)[0, 2]).all()
    gradient = jax.grad(lambda t: jnp.nansum(ops.embed(t, tokens)))(table)
    np.testing.assert_array_equal(gradient, [[1] * 3, [1] * 3, [0] * 3, [1] * 3])


def test_dense_keeps_the_type_of_the_activation():
    random = np.random.default_rng(0)
    x, w = random.standard_normal((2, 3, 5)), random.standard_normal((5, 4, 6))
    expected = np.einsum("btd,dhk->bthk", x, w)
    narrow, wide = jnp.asarray(x, jnp.bfloat16), jnp.asarray(x, jnp.float32)
    weight = jnp.asarray(w, jnp.float32)
    assert_close(ops.dense("btd,dhk->bthk", wide, weight), expected)
    got = ops.dense("btd,dhk->bthk", narrow, weight)
    assert got.dtype == jnp.bfloat16
    assert_close(got, expected, "bfloat16")
    logits = ops.dense("btd,dhk->bthk", narrow, weight, dtype=jnp.float32)
    assert logits.dtype == jnp.float32
    exact = np.einsum(
        "btd,dhk->bthk", *(np.asarray(a.astype(jnp.bfloat16), float) for a in (narrow, weight))
    )
    assert_close(logits, exact)


@pytest.mark.parametrize(
    ("x_spec", "w_spec", "expected"),
    [
        (P("data", None, None), P(None, None, None), P("data", None, None, None)),
        (P("data", None, None), P(None, "tensor", None), P("data", None, "tensor", None)),
        # The axis of the rows is taken already: the weight's use of it gives way.
        (P("data", None, None), P(None, "data", None), P("data", None, None, None)),
    ],
)
def test_sharding_of_the_result_follows_the_operands(x_spec, w_spec, expected):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((4, 3, 5)), jnp.float32)
    w = jnp.asarray(random.standard_normal((5, 2, 6)), jnp.float32)
    shape = meshes.MeshShape(data=2, tensor=2)
    mesh = meshes.build_mesh(shape, jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = (jax.NamedSharding(mesh, x_spec), jax.NamedSharding(mesh, w_spec))
        got = jax.jit(lambda x, w: ops.dense("btd,dhk->bthk", x, w))(
            *jax.device_put((x, w), placed)
        )
        assert got.sharding.is_equivalent_to(jax.NamedSharding(mesh, expected), 4)
    assert_close(got, np.einsum("btd,dhk->bthk", x, w))


def test_tokens_cut_over_tensor_are_embedded_by_all_pieces_of_the_vocabulary():
    """Each piece of the table adds to every token, whoever held it."""
    table = jnp.arange(24.0).reshape(8, 3)
    tokens = jnp.array([[0, 7, 3, 5], [6, 2, 2, 1]])
    mesh = meshes.build_mesh(meshes.MeshShape(fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = jax.device_put(table, jax.NamedSharding(mesh, P(("tensor", "fsdp"), None)))
        cut = jax.device_put(tokens, jax.NamedSharding(mesh, P("fsdp", "tensor")))
        rows = ops.embed(placed, cut)
    np.testing.assert_array_equal(rows, table[tokens])


def test_storage_axes_before_computing_ones_are_refused():
    mesh = meshes.build_mesh(meshes.MeshShape(fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, 3, 4)), jax.NamedSharding(mesh, P("fsdp")))
        w = jax.device_put(jnp.ones((4, 8)), jax.NamedSharding(mesh, P(None, ("fsdp", "tensor"))))
        with pytest.raises(ValueError, match=r"write \('tensor', 'fsdp'\) in AxisRules"):
            ops.dense("btd,df->btf", x, w)
