"""Bytes of arguments against arrays that really lie on eight devices."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshes
from k3jax.config import K3Config
from k3jax.plan import arguments
from k3jax.plan.arguments import argument_bytes, array_kinds
from k3jax.plan.parameters import count_parameters
from k3jax.plan.workload import Precision
from k3jax.train.config import TrainConfig
from k3jax.train.optimizer import adamw
from k3jax.train.state import ModelParts
from tests.small_configs import pattern_config

# As the trainer holds it: float32, AdamW.
TRAINER = Precision(parameters="float32", optimizer="adamw", momentum="float32")
SHAPES = [
    meshes.MeshShape(fsdp=8),
    meshes.MeshShape(data=2, expert=2, tensor=2),
    meshes.MeshShape(fsdp=2, expert=2, context=2),
    meshes.MeshShape(expert=4, tensor=2),
]


@pytest.fixture(scope="module")
def parts():
    # Sizes of which some divide by all axes, some by none.
    cfg = pattern_config("KKMKM", block=3, dim=24, ffn_dim=20, moe_num_experts=8, moe_latent_dim=16)
    return ModelParts(dataclasses.replace(cfg, mla=dataclasses.replace(cfg.mla, num_heads=4)))


def bytes_by_device(tree) -> dict:
    found = collections.Counter()
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_equal_those_of_a_placed_training_state(parts, shape):
    config = TrainConfig()
    with jax.set_mesh(meshes.build_mesh(shape)):
        placed = parts.placed_state(adamw(config.optimizer, parts.param_names))
        state = jax.tree.map(
            lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), placed
        )
    found = argument_bytes(parts.cfg, shape, TRAINER)
    counters = sum(np.zeros(a.shape, a.dtype).nbytes for a in (state.step, state.key)) + 8
    adam_count = 4
    by_part = {
        "parameters": bytes_by_device(state.params),
        "moments": bytes_by_device(state.optimizer),
        "state": bytes_by_device(state.rest),
        "all": bytes_by_device(state),
    }
    for device in jax.devices():
        assert by_part["parameters"][device] == found.parameters
        assert by_part["moments"][device] == found.moments + adam_count
        assert by_part["state"][device] == found.state
        assert by_part["all"][device] == found.total + counters + adam_count
    assert found.master == 0 and found.gradients == found.parameters


@pytest.mark.slow
def test_bytes_equal_those_of_a_fresh_training_state(parts):
    shape = meshes.MeshShape(fsdp=2, expert=2, tensor=2)
    with jax.set_mesh(meshes.build_mesh(shape)):
        state = parts.fresh_state(adamw(TrainConfig().optimizer, parts.param_names), 0)
    held = bytes_by_device((state.params, state.rest))
    found = argument_bytes(parts.cfg, shape, TRAINER)
    assert set(held.values()) == {found.parameters + found.state}


def test_every_parameter_of_kimi_k3_is_counted_once():
    cfg = K3Config.kimi_k3()
    counts = count_parameters(cfg)
    elements = sum(kind.size * kind.repeats * kind.count for kind in array_kinds(cfg))
    assert elements == counts.total
    one = argument_bytes(cfg, meshes.MeshShape(), Precision(master="none"))
    kept = sum(
        kind.size * kind.repeats * kind.count
        for kind in array_kinds(cfg)
        if kind.trained and kind.keep_float32
    )
    biases = 896 * cfg.num_moe_layers
    assert one.parameters == 2 * (counts.total - biases - kept) + 4 * kept
    assert one.state == 4 * biases


def test_precision_and_stages_change_the_right_parts():
    cfg, shape = K3Config.kimi_k3(), meshes.MeshShape(fsdp=16, expert=64)
    plain = argument_bytes(cfg, shape, Precision())
    wide = argument_bytes(cfg, shape, Precision(momentum="float32"))
    adam = argument_bytes(cfg, shape, Precision(optimizer="adamw"))
    assert wide.moments == 2 * plain.moments and wide.parameters == plain.parameters
    assert 1.9 < adam.moments / plain.moments < 2.0  # embedding and head have two anyway
    assert argument_bytes(cfg, shape, Precision(), training=False).total == (
        plain.parameters + plain.state
    )
    packed = argument_bytes(cfg, shape, Precision(experts="mxfp4"), training=False)
    assert 0.25 < packed.parameters / plain.parameters < 0.32
    # 22 units on 4 stages are 6 each: identities are stored, too
    staged = argument_bytes(cfg, dataclasses.replace(shape, stage=4), Precision())
    assert 6 / 22 < staged.parameters / plain.parameters < 6 / 22 + 0.05


def test_batch_bytes_follow_the_rows_and_tokens_of_a_device():
    cfg = K3Config.tiny()
    shape = meshes.MeshShape(data=2, expert=2, context=2)
    found = argument_bytes(cfg, shape, batch=8, length=64)
    assert found.batch == 2 * 32 * 2 * jnp.dtype(jnp.int32).itemsize


def test_sizes_that_do_not_divide_are_refused_by_name():
    with pytest.raises(ValueError, match="'experts' of 896 does not divide by the 256"):
        argument_bytes(K3Config.kimi_k3(), meshes.MeshShape(expert=256))


def test_weights_kept_whole_are_gathered_over_nothing():
    cfg, shape = K3Config.kimi_k3(), meshes.MeshShape(fsdp=2, expert=8, tensor=4)
    for group in arguments.weight_groups(cfg, shape, arguments.WHOLE):
        assert group.gathered_over == () and group.stored == group.used
    stored = arguments.weight_groups(cfg, shape, meshes.AxisRules())
    assert any(group.used == 16 * group.stored for group in stored)
    assert all(group.gathered_over in ((), ("fsdp",)) for group in stored if group.is_routed)
