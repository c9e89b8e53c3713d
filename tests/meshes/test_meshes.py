"""Mesh shapes, logical rules and the one wrapper of shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshes


def mesh_of(**sizes):
    shape = meshes.MeshShape(**sizes)
    return meshes.build_mesh(shape, jax.devices()[: shape.num_devices])


@pytest.mark.parametrize("size", [0, 2.0, True, float("nan"), "2", None])
def test_axis_sizes_that_are_no_counts_are_refused(size):
    with pytest.raises(ValueError, match=r"MeshShape\.fsdp=.* must be a whole number, at least 1"):
        meshes.MeshShape(fsdp=size)


def test_sizes_that_do_not_multiply_to_the_devices_are_refused():
    with pytest.raises(ValueError, match=r"data=3.* needs 6 devices, but 8 were given"):
        meshes.build_mesh(meshes.MeshShape(data=3, tensor=2))


def test_mesh_has_all_axes_and_they_are_explicit():
    mesh = mesh_of(data=2, expert=2)
    assert mesh.axis_names == meshes.AXES
    assert dict(mesh.shape) == dict.fromkeys(meshes.AXES, 1) | {"data": 2, "expert": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    abstract = meshes.abstract_mesh(meshes.MeshShape(data=1024))
    assert abstract.axis_names == meshes.AXES
    assert abstract.size == 1024


def test_rules_give_specs():
    rules = meshes.AxisRules()
    assert rules.spec(("batch", "tokens")) == P(("stage", "data", "fsdp", "expert"), ("context",))
    assert rules.spec(("embed", "heads", None)) == P(meshes.STORAGE, ("tensor",), None)
    sharded = meshes.AxisRules((("embed", ("fsdp",)), ("heads", ("tensor",)), ("ffn", ("fsdp",))))
    assert sharded.spec(("embed", "heads")) == P(("fsdp",), ("tensor",))
    with pytest.raises(ValueError, match="'fsdp' is claimed by both 'embed' and 'ffn'"):
        sharded.spec(("embed", "ffn"))
    with pytest.raises(ValueError, match="'embed' goes to the mesh axis 'tensr', which does not"):
        meshes.AxisRules((("embed", ("tensr",)),)).spec(("embed",))
    with pytest.raises(ValueError, match=r"a matrix: 2 names .* for the shape \(4,\)"):
        rules.place(("embed", "heads"), (4,), dict.fromkeys(meshes.AXES, 1), "a matrix")
    with pytest.raises(ValueError, match=r"unknown logical dimension 'width'; known: \['embed'"):
        sharded.spec(("width",))


def test_stored_dimensions_take_the_inner_axes_that_divide():
    """The innermost is gathered first: fsdp, whose neighbours lie farthest apart."""
    sizes = dict.fromkeys(meshes.AXES, 1) | {"fsdp": 4, "expert": 3, "context": 2}
    place = lambda size: meshes.AxisRules().place(("embed",), (size,), sizes)[0]  # noqa: E731
    assert place(24) == ("context", "expert", "fsdp")
    assert place(12) == ("expert", "fsdp")
    assert place(20) == "fsdp"
    assert place(6) is None


def test_without_a_mesh_per_device_is_a_plain_call():
    assert not meshes.has_mesh()
    double = meshes.per_device(lambda x, y: 2 * x, (P("data"), None), P("data"))
    np.testing.assert_array_equal(double(jnp.arange(3), None), [0, 2, 4])
    assert meshes.spec_of(jnp.zeros((2, 3))) == P(None, None)
    assert meshes.spec_or_none(P("data")) is None
    x = jnp.arange(3)
    assert meshes.reshard(x, P("data")) is x


def test_per_device_works_on_slices_and_reshards_its_arguments():
    x = jnp.arange(8.0)

    def local(x, offset):
        assert x.shape == (4,)
        return x - jax.lax.psum(x.sum(), "data") + (0 if offset is None else offset)

    with jax.set_mesh(mesh_of(data=2)):
        assert meshes.has_mesh()
        assert meshes.spec_or_none(P("data")) == P("data")
        run = meshes.per_device(local, (P("data"), None), P("data"))
        result = jax.jit(run)(x, None)  # x lies on one device; run moves it
        assert meshes.spec_of(result) == P("data")
    np.testing.assert_array_equal(result, np.arange(8) - 28)


def test_per_device_accepts_trees():
    with jax.set_mesh(mesh_of(data=2)):
        run = meshes.per_device(
            lambda tree, y: tree["a"] + tree["b"] + y,
            ({"a": P("data"), "b": P(None)}, P("data")),
            P("data"),
        )
        tree = {"a": jnp.arange(4), "b": jnp.ones((1,), jnp.int32)}
        np.testing.assert_array_equal(jax.jit(run)(tree, jnp.arange(4)), [1, 3, 5, 7])
