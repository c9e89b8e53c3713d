"""Latent experts on a mesh: whatever the sizes of its axes, the layer of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshes
from k3jax.nn.cache import CallContext
from k3jax.nn.parameters import variable_specs
from tests.nn.test_moe import layer_of, replaced
from tests.small_configs import pattern_config, quick_jit

CFG = dataclasses.replace(
    pattern_config("K", block=1, dense=0, moe_latent_dim=4, moe_num_experts=8), dim=8
)


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(np.random.default_rng(3).standard_normal((8, 6, 8)), jnp.float32)


@quick_jit
def run(layer, x):
    probe = jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)

    def total(layer, x):
        out, collected = layer(x, CallContext(trace=True, statistics=True))
        return (out * meshes.reshard(probe, meshes.spec_of(out))).sum(), (out, collected)

    gradients, (out, collected) = jax.grad(total, (0, 1), has_aux=True, allow_int=True)(layer, x)
    return out, gradients, collected


def on_mesh(layer, x, **sizes):
    """`run` with everything where the rules put it."""
    shape = meshes.MeshShape(**sizes)
    mesh = meshes.build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(mesh):
        specs = list(variable_specs(layer).values())
        leaves, structure = jax.tree.flatten(layer)
        put = lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec))  # noqa: E731
        layer = jax.tree.unflatten(structure, map(put, leaves, specs))
        tokens = ("context", "tensor") if shape.tensor > 1 else "context"
        return run(layer, put(x, P(("data", "fsdp", "expert"), tokens, None)))


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert": 2, "tensor": 2},
        pytest.param({"expert": 4}, marks=pytest.mark.slow),
        pytest.param({"expert": 2, "fsdp": 2, "context": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layer_equals_one_device(x, sizes):
    layer = layer_of(CFG)
    found, gradients, collected = on_mesh(layer, x, **sizes)
    expected, wanted, alone = run(layer, x)
    np.testing.assert_array_equal(collected["expert_ids"], alone["expert_ids"])
    np.testing.assert_array_equal(collected["histogram"], alone["histogram"])
    load = collected["exchange_load"]
    assert load.home_rows.sum() == alone["expert_counts"].sum() == x.shape[0] * x.shape[1] * 2
    assert "exchange_load" not in alone
    pairs = zip(jax.tree.leaves((found, gradients)), jax.tree.leaves((expected, wanted)))
    for got, want in pairs:
        got, want = np.asarray(got), np.asarray(want)
        assert np.abs(got - want).max() <= 1e-5 * max(np.abs(want).max(), 1e-3)


@pytest.mark.slow
def test_norm_and_shared_experts_see_what_they_see_on_one_device(x):
    """Norm over the sum of all devices; shared experts on the hidden state."""
    layer = layer_of(CFG)
    sizes = {"expert": 4, "tensor": 2}
    alone, *_ = on_mesh(replaced(layer, {".latent_up.": jnp.zeros((4, 8))}), x, **sizes)
    np.testing.assert_allclose(alone, layer.shared(x), rtol=1e-4, atol=1e-5)
    layer = replaced(layer, {".shared.down.": jnp.zeros((10, 8))})
    expected, *_ = on_mesh(layer, x, **sizes)
    scaled, *_ = on_mesh(
        replaced(layer, {".expert_down.": 10 * layer.expert_down[...]}), x, **sizes
    )
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(scaled, expected, rtol=1e-3, atol=1e-3)
