"""A model in pipeline stages: loss, gradients and statistics of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
import meshes
from k3jax import ops
from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.model import abstract_model
from k3jax.model.caches import empty_caches
from k3jax.model.pipeline import (
    count_micro_batches,
    hold_identities,
    in_depth_order,
    in_stage_order,
    pipelined_segment,
    stage_schedule,
)
from tests.small_configs import (
    on_mesh,
    pattern_config,
    quick_jit,
    random_tokens,
    randomized,
    rows_on_mesh,
    two_layers,
)
from tests.tolerances import assert_close

# Padding at both ends of a row, two documents in another.
IDS = np.ones((8, 8), np.int32)
IDS[0, :4] = IDS[3, 6:] = 0
IDS[2, 3:] = 2


def loss_and_gradients(model, tokens, ids, parallel):
    def total(model):
        loss, metrics = k3jax.next_token_loss(
            model, tokens, ids, remat="full", auxiliary=True, parallel=parallel
        )
        statistics = metrics["statistics"]
        loss += k3jax.nn.balancing.auxiliary_loss(statistics, model.cfg.moe.experts_per_token)
        return loss, (metrics["token_losses"], statistics.expert_counts, statistics.histogram)

    return jax.value_and_grad(total, has_aux=True)(model)


run = quick_jit(loss_and_gradients, static_argnames="parallel")


def on_one_device(cfg):
    model, tokens = randomized(cfg), random_tokens(cfg, *IDS.shape)
    return model, tokens, run(model, tokens, IDS, parallel=ops.Parallel())


@pytest.fixture(scope="module")
def six():
    """One layer with a dense feed-forward, then five units; a block every two layers."""
    mla = {"num_heads": 4, "q_lora_rank": 9, "kv_lora_rank": 7, "qk_nope_head_dim": 6}
    mla |= {"qk_rope_head_dim": 4, "v_head_dim": 5, "output_gate": True}
    cfg = pattern_config("MMMMMM", block=2, mla=k3jax.config.parts.MLAConfig(**mla))
    return on_one_device(cfg)


def assert_equal_in_stages(expected, shape, micro_batches):
    model, tokens, ((loss, (losses, *counts)), gradients) = expected
    mesh = meshes.build_mesh(shape, jax.devices()[: shape.num_devices])
    with jax.set_mesh(mesh):
        found = run(
            on_mesh(model),
            *rows_on_mesh(tokens, jnp.asarray(IDS)),
            parallel=ops.Parallel(pipeline_micro_batches=micro_batches),
        )
    (found_loss, (found_losses, *found_counts)), found_gradients = found
    assert_close(found_loss, loss, name="loss")
    assert_close(found_losses, losses, name="token losses")
    jax.tree.map(np.testing.assert_array_equal, found_counts, counts)
    for (path, wanted), got in zip(
        jax.tree_util.tree_leaves_with_path(gradients),
        jax.tree.leaves(found_gradients),
        strict=True,
    ):
        assert_close(got, wanted, gradient=True, name=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "micro_batches"),
    [
        ({"stage": 2, "expert": 2}, 2),
        ({"stage": 4}, 8),
    ],
    ids=str,
)
def test_stages_equal_one_device(six, sizes, micro_batches):
    assert_equal_in_stages(six, meshes.MeshShape(**sizes), micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg",
    [pattern_config("KKMKMKM", block=3), pattern_config("MMMM", block=None)],
    ids=["attention_residuals", "without_them"],
)
def test_three_units_on_two_stages_equal_one_device(cfg):
    assert_equal_in_stages(on_one_device(cfg), meshes.MeshShape(stage=2, data=2), 2)


def test_kimi_k3_has_22_units_between_head_and_tail():
    cfg = K3Config.kimi_k3()
    schedule = stage_schedule(cfg, stages=8, micro_batches=16)
    assert (schedule.units, schedule.padded, schedule.repeats) == (22, 24, 3)
    assert (schedule.first_entries, schedule.last_entries, cfg.num_blocks) == (1, 8, 8)
    assert schedule.window == 3


def test_longest_run_of_units_is_pipelined():
    assert pipelined_segment(pattern_config("KKMKMKM", block=3)) == 1
    with pytest.raises(UserError, match="2 layers without a repeated unit"):
        pipelined_segment(two_layers())


def test_order_of_stages_and_back():
    cfg = pattern_config("MMMMMM", block=2)  # units: segment 1, five times
    name = "language.stack.segments.1.layers.0.input_norm.weight"
    state = {
        "params": {name: np.arange(10.0).reshape(5, 2), "language.head": np.ones((5, 2))},
        "optimizer": ({name: np.arange(5)}, np.int32(3)),
    }
    staged = in_stage_order(state, cfg, 2)
    np.testing.assert_array_equal(staged["optimizer"][0][name], [0, 2, 4, 1, 3, 4])
    assert staged["params"][name].shape == (6, 2)
    np.testing.assert_array_equal(staged["params"]["language.head"], 1.0)
    jax.tree.map(np.testing.assert_array_equal, in_depth_order(staged, cfg, 2), state)
    assert in_stage_order(state, cfg, 1) is state


def test_abstract_model_is_reordered_on_the_mesh():
    cfg = pattern_config("MMMMMM", block=2)
    with jax.set_mesh(meshes.build_mesh(meshes.MeshShape(stage=4), jax.devices()[:4])):
        staged = in_stage_order(abstract_model(cfg), cfg, 4)
        weight = staged.language.stack.segments[1].layers[0].input_norm.weight.get_value()
        assert weight.shape == (8, cfg.dim) and weight.sharding.spec[0] == "stage"
        back = in_depth_order(staged, cfg, 4)
    for found, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(abstract_model(cfg))):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


def test_identities_keep_their_values():
    cfg = pattern_config("MMMM", block=2)
    name = "language.stack.segments.1.layers.0.feed_forward.router"
    with jax.set_mesh(meshes.build_mesh(meshes.MeshShape(stage=2), jax.devices()[:2])):
        old = in_stage_order({name: jnp.zeros((3, 2)), "language.head": jnp.zeros(4)}, cfg, 2)
        new = hold_identities(jax.tree.map(lambda x: x + 1, old), old, cfg)
    np.testing.assert_array_equal(new[name], [[1, 1], [1, 1], [1, 1], [0, 0]])
    np.testing.assert_array_equal(new["language.head"], 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scan": False}, "scan=False on a mesh with 2 pipeline stages"),
        ({"caches": True}, "caches on a mesh with 2 pipeline stages"),
        (
            {"parallel": ops.Parallel(pipeline_micro_batches=3)},
            r"pipeline_micro_batches=3 does not divide the 4 rows .* use one of \[1, 2, 4\]",
        ),
    ],
    ids=["scan", "caches", "micro_batches"],
)
def test_what_a_pipeline_does_not_do_is_refused(options, message):
    cfg = pattern_config("MMMM", block=2)
    if "caches" in options:
        options["caches"] = empty_caches(cfg, 4, 8, jnp.float32)
    mesh = meshes.build_mesh(meshes.MeshShape(stage=2), jax.devices()[:2])
    with jax.set_mesh(mesh), pytest.raises(UserError, match=message):
        jax.eval_shape(
            lambda model, tokens: model.forward(tokens, **options),
            abstract_model(cfg),
            jax.ShapeDtypeStruct((4, 8), jnp.int32),
        )


def test_units_in_the_order_of_stages_do_not_run_without_them():
    cfg = pattern_config("MMMM", block=2)
    with pytest.raises(UserError, match=r"repeated layers have \[4\] units, the model 3"):
        jax.eval_shape(
            lambda model, tokens: model.forward(tokens),
            in_stage_order(abstract_model(cfg), cfg, 2),
            jax.ShapeDtypeStruct((1, 8), jnp.int32),
        )


def test_as_many_micro_batches_as_stages_or_fewer():
    mesh = meshes.build_mesh(meshes.MeshShape(stage=4, data=2), jax.devices())
    with jax.set_mesh(mesh):
        for rows, parts in ((8, 4), (24, 4), (12, 3), (2, 1)):
            x = jax.device_put(jnp.zeros((rows, 3)), jax.NamedSharding(mesh, jax.P("data")))
            assert count_micro_batches(x, None) == parts


def test_micro_batches_are_checked():
    with pytest.raises(UserError, match=r"pipeline_micro_batches=0 must be a whole number"):
        ops.Parallel(pipeline_micro_batches=0)
