"""Routing in float32 and what reads the latent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax import ops
from k3jax.nn.cache import CallContext
from k3jax.nn.moe import LatentMoE
from k3jax.nn.parameters import RouterBias, cast_parameters
from tests.small_configs import pattern_config, quick_jit

CFG = dataclasses.replace(
    pattern_config("K", block=1, dense=0, moe_latent_dim=4, moe_num_experts=5), dim=8
)


def layer_of(cfg, seed=0) -> LatentMoE:
    random = np.random.default_rng(seed)
    abstract = jax.eval_shape(lambda key: LatentMoE(cfg, key), jax.random.key(0))
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.5 * random.standard_normal(leaf.shape), leaf.dtype), abstract
    )


def replaced(layer, arrays: dict[str, jax.Array]):
    """The layer with some variables (dotted end of the name, between dots) replaced."""
    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731

    left = dict(arrays)

    def replace(path, variable):
        name = "".join(str(entry) for entry in path) + "."
        new = [left.pop(part) for part in arrays if part in name]
        return variable.replace(new[0]) if new else variable

    layer = jax.tree_util.tree_map_with_path(replace, layer, is_leaf=is_variable)
    assert not left
    return layer


@quick_jit
def run(layer, x):
    return layer(x, CallContext(trace=True))


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(np.random.default_rng(3).standard_normal((2, 5, 8)), jnp.float32)


def test_shared_experts_read_the_hidden_state(x):
    layer = layer_of(CFG)
    alone, _ = run(replaced(layer, {".latent_up.": jnp.zeros((4, 8))}), x)
    np.testing.assert_allclose(alone, layer.shared(x), rtol=1e-5, atol=1e-6)


def test_norm_follows_the_complete_sum_of_the_experts(x):
    layer = layer_of(CFG)
    layer = replaced(layer, {".shared.down.": jnp.zeros((10, 8))})
    expected, _ = run(layer, x)
    scaled, _ = run(replaced(layer, {".expert_down.": 10 * layer.expert_down[...]}), x)
    assert np.abs(expected).max() > 0.1
    # Only the epsilon of the norm (1e-5, beside a mean square that grows 100 times) remains.
    np.testing.assert_allclose(scaled, expected, rtol=1e-3, atol=1e-3)


def test_bias_chooses_in_float32_and_does_not_weigh(x):
    cfg = dataclasses.replace(
        CFG, moe=dataclasses.replace(CFG.moe, num_experts=2, experts_per_token=1)
    )
    layer = layer_of(cfg)
    layer = replaced(
        layer,
        {
            ".router.": jnp.zeros((8, 2)),  # equal scores of 0.5
            ".router_bias.": jnp.array([1.001, 1.002], jnp.float32),
        },
    )
    for dtype in (jnp.float32, jnp.bfloat16):
        narrow = cast_parameters(layer, dtype)
        _, found = run(narrow, x.astype(dtype))
        assert (found["expert_ids"] == 1).all()
        # One expert is not renormalised: its score times the scaling factor, whatever the bias.
        np.testing.assert_allclose(found["expert_weights"], 0.5 * 1.5, rtol=1e-6)
        assert isinstance(narrow.router_bias, RouterBias)
        assert narrow.router_bias.dtype == jnp.float32
        np.testing.assert_array_equal(narrow.router_bias[...], layer.router_bias[...])


def test_single_renormalised_weight_is_one_whatever_the_bias():
    scores = jnp.array([[[0.5, 0.5]]])
    ids, cutoff = ops.select_experts(scores, jnp.array([1.001, 1.002]), experts_per_token=1)
    weights = ops.gather_scores(scores, ids)
    assert ids.tolist() == [[[1]]]
    assert float((weights / weights.sum())[0, 0, 0]) == 1.0
    assert float(cutoff[0, 0]) == np.float32(0.5) + np.float32(1.001)


def test_padding_is_not_dispatched(x):
    layer = layer_of(CFG)
    ids = jnp.array([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    dirty = jnp.where((ids != 0)[..., None], x, jnp.nan)
    routed = quick_jit(lambda m, x: m(x, CallContext(segment_ids=ids))[0])
    real = np.asarray(ids) != 0
    np.testing.assert_array_equal(
        np.asarray(routed(layer, dirty))[real], np.asarray(routed(layer, x))[real]
    )
