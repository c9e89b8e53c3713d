"""Training around packed experts: they are state, kept by steps and checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint.run import RunCheckpoints
from k3jax.train.state import ModelParts, from_tree, to_tree, with_sharding
from k3jax.train.step import make_train_step
from tests.small_configs import quick_jit
from tests.train.conftest import micro_config, micro_model


def test_steps_and_checkpoints_keep_packed_experts(tmp_path):
    model = micro_model()
    moe = dataclasses.replace(model.moe, latent_dim=32, expert_hidden_dim=32)
    model = dataclasses.replace(model, moe=moe, vision=None)
    config = micro_config(tmp_path)
    parts = ModelParts(model, packed_experts=True)
    codes = [name for name in parts.names if name.endswith(".codes")]
    assert codes and not set(codes) & set(parts.param_names)
    step, optimizer = make_train_step(parts, config)
    state = parts.fresh_state(optimizer, 0)
    random = np.random.default_rng(0)
    batch = {
        "tokens": random.integers(0, 512, (2, 12), np.int32),
        "segment_ids": np.ones((2, 12), np.int32),
    }
    after, metrics = quick_jit(step)(state, batch)
    assert bool(metrics["finite"]) and float(metrics["grad_norm"]) > 0
    for name in state.rest.keys() - set(parts.router_names):
        assert after.rest[name].dtype == jnp.uint8
        np.testing.assert_array_equal(after.rest[name], state.rest[name])
    moved = [n for n in parts.param_names if np.any(after.params[n] != state.params[n])]
    assert moved

    checkpoints = RunCheckpoints(tmp_path / "checkpoints")
    checkpoints.save(1, to_tree(after), {"position": 1})
    checkpoints.close()
    abstract = parts.abstract_state(optimizer)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpoints = RunCheckpoints(tmp_path / "checkpoints")
    found = checkpoints.restore_latest(with_sharding(to_tree(abstract), sharding), print)
    checkpoints.close()
    restored = from_tree(found.tree, abstract)
    jax.tree.map(np.testing.assert_array_equal, restored, after)
    joined = parts.join(restored.params, restored.rest)
    assert jax.tree.structure(joined) == jax.tree.structure(parts.join(after.params, after.rest))
