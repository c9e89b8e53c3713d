"""Packed experts in the module: the values of decoded ones, and state instead of parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshes
from k3jax.nn.cache import CallContext
from k3jax.nn.packed import PackedMatrix, PackedWeight, pack
from k3jax.nn.parameters import cast_parameters, named_variables
from tests.nn.test_moe import layer_of
from tests.small_configs import pattern_config, quick_jit
from tests.tolerances import assert_close

CFG = pattern_config("K", block=1, dense=0, moe_latent_dim=32, moe_num_experts=5)
CFG = dataclasses.replace(CFG, dim=8, moe=dataclasses.replace(CFG.moe, expert_hidden_dim=64))
MATRICES = ("expert_gate", "expert_up", "expert_down")


@pytest.fixture(scope="module")
def layers():
    """(packed, with the decoded matrices)."""
    layer, decoded = layer_of(CFG), layer_of(CFG)
    for name in MATRICES:
        setattr(layer, name, pack(getattr(layer, name), "even"))
        setattr(decoded, name, getattr(layer, name).parameter(jnp.float32))
    return layer, decoded


@quick_jit
def run(layer, x, segment_ids=None):
    return layer(x, CallContext(segment_ids=segment_ids))[0]


@pytest.mark.parametrize(("shape", "dtype"), [((2, 5), "float32"), ((1, 1), "bfloat16")], ids=str)
def test_packed_layer_equals_the_decoded_one(layers, shape, dtype):
    packed, decoded = (cast_parameters(layer, dtype) for layer in layers)
    assert packed.expert_up.scales.dtype == jnp.uint8
    x = jnp.asarray(np.random.default_rng(1).standard_normal((*shape, 8)), dtype)
    real = jnp.ones(shape, jnp.int32).at[0, 0].set(0) if shape[1] > 1 else None
    expected = run(decoded, x, real)
    assert np.abs(expected).max() > 0.1
    assert_close(run(packed, x, real), expected, dtype)


def test_gradients_reach_everything_but_the_packed_experts(layers):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 8)), jnp.float32)

    def gradients(layer):
        structure, params, rest = nnx.split(layer, nnx.Param, ...)

        @quick_jit
        def of(params, x):
            def loss(params, x):
                layer = nnx.merge(structure, params, rest)
                return jnp.square(layer(x, CallContext())[0]).sum()

            return jax.grad(loss, (0, 1))(params, x)

        params, dx = of(params, x)
        return {".".join(path): leaf for path, leaf in nnx.to_flat_state(params)} | {"x": dx}

    packed, decoded = (gradients(layer) for layer in layers)
    assert decoded.keys() - packed.keys() == set(MATRICES)
    for name, gradient in packed.items():
        expected = decoded[name]
        assert_close(jnp.asarray(gradient), jnp.asarray(expected), gradient=True, name=name)


def test_packed_layer_on_devices_equals_one_device(layers):
    packed, _ = layers
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 8)), jnp.float32)
    expected = run(packed, x)
    mesh = meshes.build_mesh(meshes.MeshShape(data=2), jax.devices()[:2])
    with jax.set_mesh(mesh):
        actual = run(packed, jax.device_put(x, P("data")))
    assert_close(actual, expected)


def test_packed_matrix_names_shapes_and_metadata(layers):
    packed, decoded = layers
    variables = named_variables(packed)
    assert {name for name, v in variables.items() if isinstance(v, PackedWeight)} == {
        f"{matrix}.{part}" for matrix in MATRICES for part in ("codes", "scales")
    }
    gate = packed.expert_gate
    assert isinstance(gate, PackedMatrix) and gate.shape == (5, 32, 64)
    assert gate.codes.shape == (5, 64, 16) and gate.scales.shape == (5, 64, 1)
    assert gate.codes.get_metadata()["dims"] == ("experts", "ffn", "expert_latent")
    assert decoded.expert_gate.get_metadata()["dims"] == ("experts", "expert_latent", "ffn")
