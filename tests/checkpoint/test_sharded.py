"""Loading onto a mesh: every device gets its own slice, and together they are the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import k3jax
import meshes
from k3jax.checkpoint.errors import CheckpointError
from k3jax.nn.parameters import named_variables
from tests.golden_cases import golden_case
from tests.released_files import (
    copy_checkpoint,
    random_tensors,
    stored_bytes,
    write_checkpoint,
)
from tests.small_configs import on_mesh, pattern_config, randomized

MLA = pattern_config("M", block=1).mla
SHAPE = meshes.MeshShape(fsdp=2, expert=2, tensor=2)


def rules(**axes):
    """Every dimension whole but those named."""
    table = dict.fromkeys(dict(meshes.AxisRules().table), ())
    return meshes.AxisRules(tuple((table | {k: (v,) for k, v in axes.items()}).items()))


def assert_same_slices(model, whole, shard_counts):
    """Equal values, each device's slice among them, and as many distinct slices as expected."""
    counts = {}
    for (name, found), expected in zip(
        named_variables(model).items(), named_variables(whole).values(), strict=True
    ):
        array, values = found[...], np.asarray(expected[...])
        assert array.dtype == values.dtype and array.shape == values.shape
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index], err_msg=name)
        counts[name] = len({str(shard.index) for shard in array.addressable_shards})
    for name, count in shard_counts.items():
        assert counts[name] == count, name
    return counts


@pytest.mark.parametrize("experts", ["auto", "dequantized"])
def test_packed_checkpoint_on_eight_devices_equals_one(experts):
    folder = golden_case("mxfp4").checkpoint
    whole = k3jax.load_hf(folder, experts=experts)
    packed = experts == "auto"
    # head_dim cuts inner dimensions: slices are not contiguous in the file. The scales of these
    # narrow experts (one group) cannot be cut.
    axes = {"experts": "expert", "embed": "fsdp", "vocab": "tensor", "head_dim": "tensor"}
    cut = rules(**axes, **({} if packed else {"ffn": "tensor"}))
    with jax.set_mesh(meshes.build_mesh(SHAPE)):
        model = k3jax.load_hf(folder, experts=experts, rules=cut)
    stem, suffix = "language.stack.segments.0.layers", ".codes" if packed else ""
    assert_same_slices(
        model,
        whole,
        {
            f"{stem}.1.feed_forward.expert_gate{suffix}": 2 if packed else 4,
            f"{stem}.1.feed_forward.expert_down{suffix}": 2 if packed else 4,
            f"{stem}.0.attention.q_proj": 4,
            f"{stem}.0.attention.o_proj": 4,
            f"{stem}.0.attention.q_conv": 2,
            f"{stem}.0.attention.A_log": 1,
            f"{stem}.4.attention.kv_b": 2,
            "language.head": 4,
        },
    )
    gate = named_variables(model)[f"{stem}.1.feed_forward.expert_gate{suffix}"][...]
    expected = P("expert", None, None) if packed else P("expert", None, "tensor")
    sharding = jax.NamedSharding(gate.sharding.mesh, expected)
    assert gate.sharding.is_equivalent_to(sharding, gate.ndim)


def test_scanned_layers_and_casts_on_eight_devices(tmp_path):
    cfg = pattern_config("KKMKMKM", block=2)
    folder = write_checkpoint(tmp_path, cfg, random_tensors(cfg), shards=3)
    whole = k3jax.load_hf(folder, dtype=jnp.bfloat16)
    with jax.set_mesh(meshes.build_mesh(SHAPE)):
        cut = rules(experts="expert", embed="fsdp", ffn="tensor")
        model = k3jax.load_hf(folder, dtype=jnp.bfloat16, rules=cut)
    name = "language.stack.segments.1.layers.1.feed_forward.expert_down"
    assert_same_slices(model, whole, {name: 4})


def test_default_rules_cut_every_large_parameter():
    folder = golden_case("mxfp4").checkpoint
    with jax.set_mesh(meshes.build_mesh(meshes.MeshShape(fsdp=2, expert=4))):
        model = k3jax.load_hf(folder)
    counts = assert_same_slices(model, k3jax.load_hf(folder), {})
    whole = {name for name, count in counts.items() if count == 1}
    assert all(named_variables(model)[name].size < 200 for name in whole), whole
    assert counts["language.embedding"] == counts["language.head"] == 8


@pytest.mark.parametrize("axes", [{"fsdp": 2, "expert": 4}, {"fsdp": 4, "context": 2}])
def test_sharded_model_is_saved_as_it_came(axes, tmp_path):
    source = copy_checkpoint("mxfp4", tmp_path / "source")
    with jax.set_mesh(meshes.build_mesh(meshes.MeshShape(**axes))):
        model = k3jax.load_hf(source)
        k3jax.save_hf(model, tmp_path / "saved")
    assert stored_bytes(tmp_path / "saved") == stored_bytes(source)


def test_model_cut_over_tensor_is_saved_as_from_one_device(tmp_path):
    """Heads and hidden widths on their own axis: slices that are not contiguous in the files."""
    cfg = pattern_config("KMKM", block=2, mla=dataclasses.replace(MLA, num_heads=2))
    model = randomized(cfg)
    k3jax.save_hf(model, tmp_path / "one", dtype=jnp.bfloat16, shard_bytes=30_000)
    with jax.set_mesh(meshes.build_mesh(meshes.MeshShape(fsdp=2, expert=2, tensor=2))):
        cut = on_mesh(model)
        k3jax.save_hf(cut, tmp_path / "eight", dtype=jnp.bfloat16, shard_bytes=30_000)
        again = k3jax.load_hf(tmp_path / "eight")
    for file in sorted((tmp_path / "one").iterdir()):
        assert (tmp_path / "eight" / file.name).read_bytes() == file.read_bytes(), file.name
    for name, variable in named_variables(again).items():
        wanted = named_variables(cut)[name][...]
        assert variable[...].sharding.is_equivalent_to(wanted.sharding, wanted.ndim), name


def test_dimension_that_does_not_divide_is_named():
    mesh = meshes.build_mesh(meshes.MeshShape(tensor=8))
    with (
        jax.set_mesh(mesh),
        pytest.raises(CheckpointError, match=r"A_log \(3,\): dimension .heads. of 3 does not div"),
    ):
        k3jax.load_hf(golden_case("mxfp4").checkpoint, rules=rules(heads="tensor"))
