"""Inference on a mesh: the same logits, caches and text as on one device."""

import dataclasses

import jax
import numpy as np
import pytest

import k3jax
import meshes
from tests.small_configs import (
    on_mesh,
    pattern_config,
    quick_jit,
    random_tokens,
    randomized,
    relative_error,
    rows_on_mesh,
    two_layers,
)

MLA = dataclasses.replace(two_layers().mla, num_heads=4)
ROWS = 4


@quick_jit
def run(model, tokens, ids):
    logits, caches = k3jax.prefill(model, tokens, ids, max_length=8)
    step, caches = k3jax.decode_step(model, tokens[:, 0], caches)
    text = k3jax.generate(
        model, tokens, segment_ids=ids, max_new_tokens=4, top_p=0.9, key=jax.random.key(3)
    )
    return logits, step, caches, text


@pytest.fixture(scope="module")
def one_device():
    model = randomized(pattern_config("KM", block=1, mla=MLA))
    tokens, ids = random_tokens(model.cfg, ROWS, 5), np.ones((ROWS, 5), np.int32)
    ids[:3, :2] = 0
    return model, (tokens, ids), run(model, tokens, ids)


def assert_equal_to_one_device(one_device, axes: dict, *, are_rows_cut: bool):
    model, inputs, (logits, step, caches, text) = one_device
    shape = meshes.MeshShape(**axes)
    with jax.set_mesh(meshes.build_mesh(shape, jax.devices()[: shape.num_devices])):
        placed = rows_on_mesh(*inputs) if are_rows_cut else jax.device_put(inputs, jax.P())
        found = run(on_mesh(model), *placed)
    real = inputs[1] != 0
    assert relative_error(np.asarray(found[0])[real], np.asarray(logits)[real]) <= 1e-5
    assert relative_error(found[1], step) <= 1e-5
    rows = ROWS // (shape.data * shape.fsdp * shape.expert) if are_rows_cut else ROWS
    for got, expected in zip(
        jax.tree.leaves(found[2].layers), jax.tree.leaves(caches.layers), strict=True
    ):
        assert got.sharding.shard_shape(got.shape)[1] == rows
        if got.ndim == 4:  # latents: columns of padding are unspecified
            valid = np.asarray(caches.valid)
            got, expected = np.asarray(got)[:, valid], np.asarray(expected)[:, valid]
        assert relative_error(got, expected) <= 1e-5
    np.testing.assert_array_equal(found[2].valid, caches.valid)
    np.testing.assert_array_equal(found[3], text)


def test_heads_and_experts_over_devices_equal_one_device(one_device):
    assert_equal_to_one_device(one_device, {"tensor": 2, "expert": 2}, are_rows_cut=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "are_rows_cut"),
    [
        ({"tensor": 2, "expert": 2}, False),  # fewer rows than ranks: each adds its experts' part
        ({"data": 2, "fsdp": 2}, True),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, True),
    ],
)
def test_other_meshes_equal_one_device(one_device, axes, are_rows_cut):
    assert_equal_to_one_device(one_device, axes, are_rows_cut=are_rows_cut)
