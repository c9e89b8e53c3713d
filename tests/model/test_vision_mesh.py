"""Patches cut over a mesh, across items: logits and gradients of one device."""

import jax
import numpy as np
import pytest

import k3jax
import meshes
from k3jax import ops
from tests.small_configs import pattern_config, quick_jit, random_tokens, randomized
from tests.tolerances import assert_close
from tests.vision_cases import PLACEHOLDER, random_media, seeing

CFG = seeing(pattern_config("M", block=1))
GRIDS = np.array([[1, 2, 4], [3, 2, 2], [1, 6, 6]])  # 2, 1 and 9 features of 56 patches


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"context": 4}, {"fsdp": 2, "expert": 2, "context": 2}], ids=str)
def test_pictures_over_devices_equal_one_device(sizes):
    model, media = randomized(CFG), random_media(CFG, GRIDS, items=4)
    tokens = np.array(random_tokens(CFG, 4, 7))
    tokens[tokens == PLACEHOLDER] = 0
    tokens[1, 2:4] = tokens[2, 6] = tokens[3, :7] = tokens[0, 5:] = PLACEHOLDER

    @quick_jit
    def run(model, tokens, media):
        def total(model):
            return k3jax.next_token_loss(model, tokens, None, media)[0]

        return jax.value_and_grad(total)(model)

    loss, gradients = run(model, tokens, media)
    shape = meshes.MeshShape(**sizes)
    mesh = meshes.build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(mesh):
        count, axes = ops.spread_patches(56)
        assert axes == tuple(sizes)
        assert count == 64
        whole = jax.NamedSharding(mesh, jax.P())
        found_loss, found = run(*jax.device_put((model, tokens, media), whole))
    assert_close(found_loss, loss)
    for (path, wanted), got in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(found), strict=True
    ):
        assert_close(got, wanted, gradient=True, name=jax.tree_util.keystr(path))


def test_few_patches_stay_on_few_devices():
    mesh = meshes.build_mesh(meshes.MeshShape(data=2, context=2, tensor=2))
    with jax.set_mesh(mesh):
        assert ops.spread_patches(4) == (4, ())
        assert ops.spread_patches(19) == (32, ("context", "tensor"))
        assert ops.spread_patches(100) == (128, ("data", "context", "tensor"))
    assert ops.spread_patches(19) == (19, ())
