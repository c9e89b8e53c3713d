"""Parameters in bfloat16 with a float32 copy, moments in bfloat16, one moment per matrix."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.train.abstract import large_scale_config
from k3jax.train.config import OptimizerConfig
from k3jax.train.optimizer import make_optimizer
from k3jax.train.precision import LARGE_SCALE, PrecisionConfig
from k3jax.train.state import ModelParts, from_tree, to_tree
from k3jax.train.step import make_train_step
from tests.small_configs import pattern_config


def test_rules_keep_one_moment_per_matrix_and_two_of_the_rest():
    params = {
        "language.stack.segments.0.layers.0.attention.q_proj": jnp.ones((3, 4)),
        "language.embedding": jnp.ones((5, 3)),
    }
    optimizer = make_optimizer(OptimizerConfig(rule="momentum"), params, {next(iter(params))})
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(optimizer.init(params)))
    assert sizes == [1, 12, 15, 15]  # Adam's count, a moment of the matrix, two of the table


def test_momentum_moves_along_the_mean_gradient():
    name = "language.stack.segments.0.layers.0.attention.q_proj"
    params = {name: jnp.zeros((2, 2))}
    config = OptimizerConfig(rule="momentum", clip_norm=1e9, beta2=0.5)
    optimizer = make_optimizer(config, params, {name})
    state, gradient = optimizer.init(params), {name: jnp.ones((2, 2))}
    updates, state = optimizer.update(gradient, state, params)
    np.testing.assert_allclose(updates[name], 1.5)  # g + 0.5 m, with m = g
    updates, state = optimizer.update(gradient, state, params)
    np.testing.assert_allclose(updates[name], 1.75)


def test_clipping_scales_to_the_norm():
    name = "language.norm.weight"
    config = OptimizerConfig(clip_norm=1.0)
    optimizer = make_optimizer(config, {name}, set())
    params = {name: jnp.zeros(4)}
    _, (_, adam, _) = optimizer.update({name: jnp.full(4, 3.0)}, optimizer.init(params), params)
    np.testing.assert_allclose(adam.mu[name], 0.1 * 0.5, rtol=1e-6)


@pytest.fixture(scope="module")
def stepped():
    """(state before, state after two steps, metrics) of a small model at large-scale precision."""
    config = large_scale_config(2, 7, remat="none", steps=4)
    config = dataclasses.replace(
        config, optimizer=OptimizerConfig(rule="momentum", peak_lr=1e-4, warmup_steps=0)
    )
    parts = ModelParts(pattern_config("KM", block=1), precision=config.precision)
    step, optimizer = make_train_step(parts, config)
    before = parts.fresh_state(optimizer, 0)
    tokens = jnp.arange(14, dtype=jnp.int32).reshape(2, 7) % 11
    batch, run, state = (
        {"tokens": tokens, "segment_ids": jnp.ones_like(tokens)},
        jax.jit(step),
        before,
    )
    for _ in range(2):
        state, metrics = run(state, batch)
    return parts, optimizer, before, state, metrics


@pytest.mark.slow
def test_the_copy_moves_by_less_than_bfloat16_can_tell(stepped):
    parts, _, before, after, metrics = stepped
    assert bool(metrics["finite"])
    narrow = {name for name, p in after.params.items() if p.dtype == jnp.bfloat16}
    assert set(after.master) == narrow and len(narrow) > 20
    for name, master in after.master.items():
        assert master.dtype == jnp.float32
        np.testing.assert_array_equal(after.params[name], master.astype(jnp.bfloat16))
    name = next(n for n in parts.param_names if n.endswith("q_proj"))
    moved = np.abs(after.master[name] - before.master[name])
    assert moved.max() > 0
    same = np.asarray(after.params[name] == before.params[name])
    assert (moved[same] > 0).any()  # what bfloat16 alone would have lost


@pytest.mark.slow
def test_types_and_state_survive_the_tree_of_names(stepped):
    parts, optimizer, before, after, _ = stepped
    types = lambda state: [leaf.dtype for leaf in jax.tree.leaves(state)]  # noqa: E731
    assert types(before) == types(after)
    again = from_tree(to_tree(after), parts.abstract_state(optimizer))
    assert jax.tree.structure(again) == jax.tree.structure(after)
    jax.tree.map(np.testing.assert_array_equal, again, after)


def test_float32_parameters_and_no_master_keep_no_copy():
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)}
    assert list(LARGE_SCALE.master_of(params)) == ["a"]
    assert PrecisionConfig(parameters="bfloat16", master="none").master_of(params) == {}
