"""A whole training state on one mesh and on another, and parts of it in other types."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshes
from k3jax.checkpoint.part import read_part
from k3jax.checkpoint.run import RunCheckpoints, read_latest
from k3jax.train.config import TrainConfig
from k3jax.train.state import ModelParts, to_tree
from k3jax.train.step import make_train_step
from tests.small_configs import pattern_config
from tests.vision_cases import seeing

CFG = seeing(pattern_config("KMKM", block=2, moe_num_experts=8))
SAVED = {"fsdp": 2, "expert": 4}


def placed_tree(axes: dict | None, cfg=CFG) -> dict:
    """Abstract arrays of a training state, with their shardings on a mesh or one device."""
    mesh = contextlib.nullcontext()
    if axes is not None:
        mesh = jax.set_mesh(meshes.build_mesh(meshes.MeshShape(**axes), jax.devices()))
    with mesh:
        parts = ModelParts(cfg)
        _, optimizer = make_train_step(parts, TrainConfig())
        return to_tree(parts.placed_state(optimizer))


def filled(tree: dict) -> dict:
    """Random bits of each type; no float is a NaN."""
    random = np.random.default_rng(0)

    def draw(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            values = random.standard_normal(leaf.shape).astype(leaf.dtype)
        else:
            values = random.integers(0, 100, leaf.shape).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    return jax.tree.map(draw, tree)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint of eight devices, and the values in it."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    tree = filled(placed_tree(SAVED))
    checkpoints = RunCheckpoints(folder)
    checkpoints.save(7, tree, {"next": 3})
    checkpoints.close()
    return folder, jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 4, "expert": 2},
        None,
    ],
    ids=str,
)
def test_restored_on_another_mesh_bit_for_bit(saved, axes):
    folder, values = saved
    wanted = placed_tree(axes)
    found = read_latest(folder, wanted, pytest.fail)
    assert (found.step, found.position) == (7, {"next": 3})
    jax.tree.map(np.testing.assert_array_equal, found.tree, values)
    cut = 0
    for got, leaf in zip(jax.tree.leaves(found.tree), jax.tree.leaves(wanted), strict=True):
        assert got.dtype == leaf.dtype
        assert got.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        cut += not got.sharding.is_fully_replicated
    assert cut > (0 if axes is None else 100) or (axes is None and cut == 0)


def test_part_without_vision_and_in_another_type(saved):
    """The text model alone, as bfloat16 weights; then those as float32 masters on a mesh."""
    folder, values = saved
    text = placed_tree({"fsdp": 8})["params"]["language"]
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding), text
    )
    found = read_part(folder, 7, {"params": {"language": wanted}})["params"]
    assert found.keys() == {"language"}
    own = values["params"]["language"]
    jax.tree.map(
        lambda got, value: np.testing.assert_array_equal(got, value.astype(jnp.bfloat16)),
        found["language"],
        own,
    )


def test_weights_in_bfloat16_become_float32_masters(tmp_path):
    narrow = {"params": {"w": jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8) / 3}}
    checkpoints = RunCheckpoints(tmp_path / "checkpoints")
    checkpoints.save(1, narrow, {})
    checkpoints.close()
    with jax.set_mesh(meshes.build_mesh(meshes.MeshShape(fsdp=8))):
        sharding = jax.NamedSharding(jax.sharding.get_mesh(), jax.P("fsdp"))
        leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
        found = read_part(tmp_path / "checkpoints", 1, {"params": {"w": leaf}})["params"]["w"]
    assert found.dtype == jnp.float32 and found.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(found, np.asarray(narrow["params"]["w"], np.float32))


def test_part_that_is_not_stored_is_named(saved):
    folder, _ = saved
    leaf = jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.raises(ValueError, match=r"params\.extra is not stored"):
        read_part(folder, 7, {"params": {"extra": leaf}})
    with pytest.raises(ValueError, match=r"head is stored as \(.*wanted \(3,\)"):
        read_part(folder, 7, {"params": {"language": {"head": leaf}}})
    with pytest.raises(ValueError, match="step is stored in int32, wanted float32"):
        read_part(folder, 7, {"step": jax.ShapeDtypeStruct((), jnp.float32)})
