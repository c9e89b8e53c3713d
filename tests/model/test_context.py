"""Rows cut over the context axis: logits, loss and gradients of one device, whatever the length."""

import jax
import numpy as np
import pytest

import k3jax
import meshes
from k3jax import ops
from k3jax.errors import UserError
from tests.small_configs import (
    previous_family,
    quick_jit,
    random_tokens,
    randomized,
    two_layers,
)
from tests.tolerances import assert_close

LENGTH = 11  # no multiple of anything
IDS = np.ones((2, LENGTH), np.int32)
IDS[0] = np.repeat([1, 2, 1, 3, 0], [3, 1, 4, 1, 2])
IDS[1, :7] = 0


def on_mesh(function, *arguments, **sizes):
    shape = meshes.MeshShape(**sizes)
    mesh = meshes.build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(mesh):
        return function(*jax.device_put(arguments, jax.NamedSharding(mesh, jax.P())))


def assert_trees_close(found, wanted, **options):
    for (path, w), f in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        assert_close(f, w, name=jax.tree_util.keystr(path), **options)


@pytest.mark.slow
@pytest.mark.parametrize("ids", [IDS, None], ids=["documents", "one"])
def test_logits_of_a_length_that_does_not_divide_equal_one_device(ids):
    model = randomized(two_layers())
    tokens = random_tokens(model.cfg, 2, LENGTH)
    forward = quick_jit(lambda model, tokens, *ids: model(tokens, *ids))
    given = () if ids is None else (ids,)
    wanted = forward(model, tokens, *given)
    found = on_mesh(forward, model, tokens, *given, context=4)
    real = np.ones_like(IDS, bool) if ids is None else ids != 0
    assert_close(np.asarray(found)[real], np.asarray(wanted)[real])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "sizes", "parallel"),
    [
        (two_layers(), {"context": 8}, ops.Parallel(context_layout="balanced")),
        (previous_family(), {"data": 2, "context": 4}, ops.Parallel()),
    ],
    ids=["8_balanced", "data_2_context_4_unbounded_gate"],
)
def test_loss_and_gradients_equal_one_device(cfg, sizes, parallel):
    model = randomized(cfg)
    tokens, targets = random_tokens(cfg, 2, LENGTH), np.ones_like(IDS, bool)
    targets[:, 4] = False

    @quick_jit
    def run(model, tokens, ids, targets):
        def total(model):
            loss, metrics = k3jax.next_token_loss(
                model, tokens, ids, targets=targets, parallel=parallel, remat="full"
            )
            statistics = metrics["statistics"]
            counts = (metrics["num_targets"], statistics.expert_counts, statistics.num_tokens)
            return loss, (metrics["token_losses"], counts)

        return jax.value_and_grad(total, has_aux=True)(model)

    (loss, (losses, counts)), gradients = run(model, tokens, IDS, targets)
    (found_loss, (found_losses, found_counts)), found = on_mesh(
        run, model, tokens, IDS, targets, **sizes
    )
    jax.tree.map(np.testing.assert_array_equal, found_counts, counts)
    assert_close(found_loss, loss)
    assert_close(found_losses, losses)
    assert_trees_close(found, gradients, gradient=True)


@pytest.mark.slow
def test_prompts_with_caches_equal_one_device():
    model = randomized(two_layers())
    tokens = random_tokens(model.cfg, 2, 12)

    @quick_jit
    def run(model, first, second, token):
        logits, caches = k3jax.prefill(model, first, max_length=13, last_only=True)
        more, caches = k3jax.prefill(model, second, caches=caches)
        step, _ = k3jax.decode_step(model, token, caches)
        return logits, more, step

    pieces = tokens[:, :8], tokens[:, 8:]
    wanted = run(model, *pieces, tokens[:, 0])
    mesh = meshes.build_mesh(meshes.MeshShape(context=2), jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = jax.device_put(pieces, jax.NamedSharding(mesh, jax.P(None, "context")))
        whole = jax.device_put((model, tokens[:, 0]), jax.NamedSharding(mesh, jax.P()))
        found = run(whole[0], *placed, whole[1])
    assert_trees_close(found, wanted)


def test_rows_that_do_not_divide_are_refused_with_numbers_that_would():
    model = k3jax.model.abstract_model(two_layers())
    mesh = meshes.build_mesh(meshes.MeshShape(data=2, fsdp=2, expert=2))
    message = r"6 rows .*data 2 x fsdp 2 x expert 2.* multiple of 8 rows \(or of 4"
    with jax.set_mesh(mesh), pytest.raises(UserError, match=message):
        jax.eval_shape(lambda model: model(np.zeros((6, 4), np.int32)), model)
