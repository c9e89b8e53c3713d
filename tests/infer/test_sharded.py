"""Rows spread over devices: the same logits, caches and text as on one device."""

import jax
import numpy as np

import k3jax
import meshes
from tests.small_configs import quick_jit, random_tokens, randomized, relative_error, two_layers


@quick_jit
def run(model, tokens, ids):
    logits, caches = k3jax.prefill(model, tokens, ids, max_length=8)
    step, caches = k3jax.decode_step(model, tokens[:, 0], caches)
    text = k3jax.generate(
        model, tokens, segment_ids=ids, max_new_tokens=4, top_p=0.9, key=jax.random.key(3)
    )
    return logits, step, caches, text


def test_rows_over_devices_equal_one_device():
    model = randomized(two_layers())
    tokens, ids = random_tokens(model.cfg, 8, 5), np.ones((8, 5), np.int32)
    ids[:3, :2] = 0
    logits, step, caches, text = run(model, tokens, ids)
    mesh = meshes.build_mesh(meshes.MeshShape(data=2, fsdp=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, meshes.AxisRules().spec(("batch", "tokens")))
        whole = jax.NamedSharding(mesh, jax.P())
        placed = (jax.device_put(model, whole), *jax.device_put((tokens, ids), rows))
        found = run(*placed)
    real = ids != 0
    assert relative_error(np.asarray(found[0])[real], np.asarray(logits)[real]) <= 1e-5
    assert relative_error(found[1], step) <= 1e-5
    for got, expected in zip(jax.tree.leaves(found[2].layers), jax.tree.leaves(caches.layers)):
        assert got.sharding.shard_shape(got.shape)[1] == 2  # rows, 4 devices
        if got.ndim == 4:  # latents: columns of padding are unspecified
            valid = np.asarray(caches.valid)
            got, expected = np.asarray(got)[:, valid], np.asarray(expected)[:, valid]
        assert relative_error(got, expected) <= 1e-5
    np.testing.assert_array_equal(found[2].valid, caches.valid)
    np.testing.assert_array_equal(found[3], text)
