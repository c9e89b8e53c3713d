"""Training in pipeline stages: the state of one device after the same steps."""

import jax
import numpy as np
import pytest

import meshes
from k3jax import ops
from k3jax.model.pipeline import in_depth_order, in_stage_order, pipelined_names, stage_order
from k3jax.train.config import OptimizerConfig, TrainConfig
from k3jax.train.state import ModelParts, named_arrays
from k3jax.train.step import make_train_step
from tests.small_configs import pattern_config, quick_jit, random_tokens, rows_on_mesh
from tests.tolerances import assert_close

STAGES = 2


def two_steps(parts, config, batch, place=lambda state: state):
    step, optimizer = make_train_step(parts, config)
    first = state = place(parts.fresh_state(optimizer, 0))
    step = quick_jit(step)
    for _ in range(2):
        state, metrics = step(state, batch)
    return first, state, metrics, optimizer


@pytest.mark.slow
def test_two_steps_in_stages_equal_those_of_one_device():
    cfg = pattern_config("MMMM", block=2)  # three units on two stages
    tokens = np.asarray(random_tokens(cfg, 8, 8))
    ids = np.ones_like(tokens)
    ids[1, 5:], ids[2, :3] = 2, 0
    config = TrainConfig(
        steps=10,
        batch=8,
        remat="full",
        optimizer=OptimizerConfig(peak_lr=1e-2, warmup_steps=1, weight_decay=0.1),
        parallel=ops.Parallel(pipeline_micro_batches=4),
    )
    parts = ModelParts(cfg)
    start, wanted, expected, _ = two_steps(parts, config, {"tokens": tokens, "segment_ids": ids})

    def place(state):
        return jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), state, abstract)

    mesh = meshes.build_mesh(meshes.MeshShape(stage=STAGES, data=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        abstract = parts.placed_state(make_train_step(parts, config)[1])
        batch = dict(zip(("tokens", "segment_ids"), rows_on_mesh(tokens, ids), strict=True))
        first, last, metrics, _ = two_steps(parts, config, batch, place)
        plain = in_depth_order(last, cfg, STAGES)
        again = in_stage_order(plain, cfg, STAGES)
        target = in_depth_order(abstract, cfg, STAGES)
        begin = in_depth_order(first, cfg, STAGES)
    jax.tree.map(np.testing.assert_array_equal, begin.params, start.params)
    assert_close(metrics["loss"], expected["loss"])
    assert_close(metrics["grad_norm"], expected["grad_norm"], gradient=True)
    for name in parts.param_names:
        moved = np.asarray(wanted.params[name]) - np.asarray(start.params[name])
        found = np.asarray(plain.params[name]) - np.asarray(start.params[name])
        # Adam divides small gradients by their own size: what is noise in them shows in full.
        assert np.abs(found - moved).mean() <= 1e-3 * np.abs(moved).mean() + 1e-9, name
    for name, bias in wanted.rest.items():
        np.testing.assert_allclose(plain.rest[name], bias, atol=1e-5)

    # What is an identity is as it was; the checkpoint has none, and gives the same state back.
    is_pipelined, real = pipelined_names(cfg), stage_order(cfg, STAGES).is_real()
    types = named_arrays(target)
    arrays = zip(*(named_arrays(s).items() for s in (first, last, again, plain)), strict=True)
    for (name, before), (_, after), (_, restored), (_, stored) in arrays:
        assert (types[name].shape, types[name].sharding) == (stored.shape, stored.sharding), name
        if is_pipelined(name):
            assert restored.sharding == after.sharding, name
            before, after, restored = map(np.asarray, (before, after, restored))
            np.testing.assert_array_equal(after[~real], before[~real], err_msg=name)
            np.testing.assert_array_equal(restored[real], after[real], err_msg=name)
