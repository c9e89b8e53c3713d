"""Tokens sharded over devices: the loss, its gradients and the statistics of one device."""

import jax
import numpy as np
import pytest

import k3jax
import meshes
from tests.small_configs import pattern_config, quick_jit, random_tokens, randomized, two_layers
from tests.tolerances import assert_close

IDS = np.ones((8, 9), np.int32)
IDS[0, :4] = IDS[3, 6:] = 0
IDS[2, 3:] = 2


def loss_and_gradients(model, tokens, ids, remat):
    def total(model):
        loss, metrics = k3jax.next_token_loss(model, tokens, ids, remat=remat)
        return loss, (metrics["num_targets"], metrics["token_losses"], metrics["statistics"])

    return jax.value_and_grad(total, has_aux=True)(model)


CASES = {
    "packed_experts": (two_layers(), IDS, "none"),
    "scanned_recomputed": (pattern_config("KMKM", block=3, dense=4), None, "full"),
}


@pytest.mark.parametrize("name", CASES)
def test_data_parallel_loss_and_gradients_equal_one_device(name):
    cfg, ids, remat = CASES[name]
    model = randomized(cfg)
    tokens = random_tokens(cfg, *IDS.shape)
    run = quick_jit(loss_and_gradients, static_argnames="remat")
    (loss, aux), gradients = run(model, tokens, ids, remat=remat)

    mesh = meshes.build_mesh(meshes.MeshShape(data=2, fsdp=2), jax.devices()[:4])
    rules = meshes.AxisRules()
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, rules.spec(("batch", "tokens")))
        whole = jax.NamedSharding(mesh, rules.spec(()))
        placed = jax.device_put((tokens, ids), rows)
        (found_loss, found_aux), found = run(jax.device_put(model, whole), *placed, remat=remat)
    assert_close(found_loss, loss, name="loss")
    assert int(found_aux[0]) == int(aux[0])
    assert_close(found_aux[1], aux[1], name="token losses")
    assert found_aux[1].sharding.is_equivalent_to(rows, 2)
    jax.tree.map(np.testing.assert_array_equal, found_aux[2], aux[2])
    for (path, wanted), got in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(found), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert got.sharding.is_fully_replicated, name
        assert_close(got, wanted, gradient=True, name=name)
