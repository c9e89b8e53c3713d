"""Training around packed experts: they are state, kept by steps and checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint.run import RunCheckpoints
from k3jax.train.optimizer import adamw
from k3jax.train.state import ModelParts, from_tree, to_tree, with_sharding
from k3jax.train.step import make_train_step
from tests.small_configs import quick_jit
from tests.train.conftest import micro_config, micro_model


@pytest.fixture(scope="module")
def parts():
    model = micro_model()
    moe = dataclasses.replace(model.moe, latent_dim=32, expert_hidden_dim=32)
    return ModelParts(dataclasses.replace(model, moe=moe, vision=None), packed_experts=True)


def test_state_and_checkpoints_keep_packed_experts_apart(parts, tmp_path):
    packed = {name for name in parts.names if name.endswith((".codes", ".scales"))}
    assert len(packed) == 6 and not packed & set(parts.param_names)
    optimizer = adamw(micro_config(tmp_path).optimizer, parts.param_names)
    abstract = parts.abstract_state(optimizer)
    assert abstract.rest.keys() == packed | set(parts.router_names)
    random = np.random.default_rng(0)
    state = jax.tree.map(
        lambda leaf: jnp.asarray(random.integers(0, 255, leaf.shape), leaf.dtype), abstract
    )
    model = parts.join(state.params, state.rest)
    again = parts.split(model)
    jax.tree.map(np.testing.assert_array_equal, again, (state.params, state.rest))

    checkpoints = RunCheckpoints(tmp_path / "checkpoints")
    checkpoints.save(1, to_tree(state), {"position": 1})
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpoints.wait()
    found = checkpoints.restore_latest(with_sharding(to_tree(abstract), sharding), print)
    checkpoints.close()
    restored = from_tree(found.tree, abstract)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert {restored.rest[name].dtype for name in packed} == {jnp.dtype("uint8")}


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_step_moves_everything_but_packed_experts(parts, remat, tmp_path):
    config = dataclasses.replace(micro_config(tmp_path), remat=remat)
    step, optimizer = make_train_step(parts, config)
    state = parts.fresh_state(optimizer, 0)
    tokens = np.random.default_rng(0).integers(0, 512, (2, 12), np.int32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens)}
    after, metrics = quick_jit(step)(state, batch)
    assert bool(metrics["finite"]) and float(metrics["grad_norm"]) > 0
    for name in state.rest.keys() - set(parts.router_names):
        np.testing.assert_array_equal(after.rest[name], state.rest[name])
    assert any(np.any(after.params[name] != state.params[name]) for name in parts.param_names)
