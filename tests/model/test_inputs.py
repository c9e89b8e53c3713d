"""What `model(tokens)` and `next_token_loss` refuse before anything is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import k3jax
import meshes
from k3jax.errors import UserError
from tests.small_configs import pattern_config


@pytest.fixture(scope="module")
def model():
    return k3jax.init(pattern_config("KM", block=1), jax.random.key(0))


@pytest.mark.parametrize(
    ("tokens", "segment_ids", "message"),
    [
        (np.zeros(5, np.int32), None, r"tokens must be integers \[B, T\].*\(5,\)"),
        (np.zeros((2, 0), np.int32), None, "at least one"),
        (np.zeros((0, 4), np.int32), None, "at least one"),
        (np.zeros((1, 4), np.float32), None, "float32"),
        (np.zeros((1, 4), np.int32), np.ones((1, 4), np.float32), "segment_ids must be integers"),
        (np.zeros((1, 4), np.int32), np.ones((1, 5), np.int32), "the shape of tokens"),
        (np.full((1, 4), 1 + 2**32), None, "4294967297, which is no 32-bit integer"),
    ],
)
@pytest.mark.parametrize("call", ["model", "loss"])
def test_wrong_shapes_and_types_are_named(model, tokens, segment_ids, message, call):
    with pytest.raises(UserError, match=message):
        if call == "model":
            model(tokens, segment_ids)
        else:
            k3jax.next_token_loss(model, tokens, segment_ids)


def test_types_other_than_floats_are_no_parameter_types():
    with pytest.raises(UserError, match="dtype=int32 must be a floating-point type"):
        k3jax.init(pattern_config("K", block=1), jax.random.key(0), dtype=jnp.int32)


def test_weights_that_are_not_finite_write_no_text(model):
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), model)
    with pytest.raises(UserError, match="logits are not finite"):
        k3jax.generate(broken, np.zeros((1, 4), np.int32), max_new_tokens=2)


@pytest.mark.slow
def test_decoding_where_64_bit_types_are_on(model):
    tokens = np.arange(6, dtype=np.int32)[None]
    expected = k3jax.generate(model, tokens, max_new_tokens=3, temperature=0.0)
    with jax.enable_x64(True):
        new = k3jax.generate(model, tokens, max_new_tokens=3, temperature=0.0)
        loss, _ = k3jax.next_token_loss(model, tokens)
    np.testing.assert_array_equal(new, expected)
    assert np.isfinite(loss)


def test_rows_on_an_axis_that_cuts_no_rows_are_refused(model):
    mesh = meshes.build_mesh(meshes.MeshShape(tensor=2), jax.devices()[:2])
    with jax.set_mesh(mesh):
        tokens = jax.device_put(np.zeros((2, 4), np.int32), jax.NamedSharding(mesh, P("tensor")))
        with pytest.raises(UserError, match=r"batch dimension of the tokens lies on \['tensor'\]"):
            model.forward(tokens)
