"""Calls with media: growth, refusals, loss targets, meshes, and text programs that pay nothing."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
import meshes
from k3jax.errors import UserError
from k3jax.media import Media, grow_placeholders
from k3jax.model import abstract_model
from k3jax.model.loss import target_mask
from tests.small_configs import pattern_config, quick_jit, random_tokens, randomized
from tests.tolerances import assert_close
from tests.vision_cases import PLACEHOLDER, random_media, seeing

CFG = seeing(pattern_config("M", block=1))
GRIDS = np.array([[1, 2, 4], [2, 2, 2], [1, 4, 6]])  # 2, 1 and 6 features


def prompt(rows: int = 2, length: int = 6) -> np.ndarray:
    """Random text without placeholder."""
    tokens = np.array(random_tokens(CFG, rows, length))
    tokens[tokens == PLACEHOLDER] = 0
    return tokens


@pytest.fixture(scope="module")
def model():
    return randomized(CFG)


@pytest.fixture(scope="module")
def media():
    return random_media(CFG, GRIDS, num_patches=48, items=4)


@pytest.fixture(scope="module")
def tokens():
    """Items 0 and 1 in row 0, item 2 in row 1: rows grow to 7 and 11."""
    tokens = prompt()
    tokens[0, [1, 2]] = tokens[1, 4] = PLACEHOLDER
    return tokens


@pytest.fixture(scope="module")
def logits_of():
    return quick_jit(lambda m, t, s, media: m.forward(t, s, media)[0])


@pytest.fixture
def quick(monkeypatch):
    """Calls outside of jit compile without optimisation."""
    arrays = quick_jit(lambda model, *inputs: model.forward(*inputs)[0])
    monkeypatch.setattr(sys.modules["k3jax.model.k3"], "_logits", arrays)


@pytest.mark.usefixtures("quick")
def test_tokens_grow_where_values_are_known(model, tokens, media, logits_of):
    grown = grow_placeholders(tokens, media, placeholder_id=PLACEHOLDER, pad_id=CFG.pad_id)
    assert grown.tokens.shape == (2, 11)
    expected = logits_of(model, grown.tokens, grown.segment_ids, media)
    real = grown.segment_ids > 0
    assert np.isfinite(expected[real]).all()
    for given in (tokens, jnp.asarray(tokens)):
        np.testing.assert_array_equal(model(given, media=media)[real], expected[real])
    again = model(grown.tokens, grown.segment_ids, media)  # grown already: as it is
    np.testing.assert_array_equal(again, expected)


@pytest.mark.usefixtures("quick")
def test_rows_that_end_in_padding_are_padded_on_the_right(model, tokens, media, logits_of):
    ids = np.ones((2, 6), np.int32)
    ids[0, 4:] = 0
    found = model(tokens, ids, media)
    grown = grow_placeholders(
        tokens, media, placeholder_id=PLACEHOLDER, segment_ids=ids, pad_side="right", pad_id=39
    )
    assert grown.segment_ids[0].tolist() == [1] * 5 + [0] * 6
    expected = logits_of(model, grown.tokens, grown.segment_ids, media)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([[1, 3, 4]], r"grid \(frames, rows, columns\) = \(1, 3, 4\): rows and columns must be"),
        ([[1, 2, 0]], "must be even"),
        ([[5, 2, 2]], r"item 0 .* frames must lie in 1\.\.4"),
        ([[1, 2, 2], [0, 2, 2]], r"item 1 .* frames must lie in 1\.\.4"),
        ([[1, 514, 2]], "may not exceed 512"),
        ([[4, 4, 4]], r"need 64 patches; media\.patches has 48"),
        ([[0, 0, 0], [1, 2, 2]], "rows of zeros must come after all items"),
        ([[1, 2, 2]], "tokens hold 3 placeholders .id 37., but media holds 1 items with 1 feat"),
        ([[1, 2, 2]] * 5, "tokens hold 3 placeholders .id 37., but media holds 5 items"),
        ([[0, 0, 0]], "tokens hold 3 placeholders .id 37., but media holds 0 items"),
    ],
)
def test_media_that_does_not_fit_is_refused(model, tokens, media, grids, message):
    wrong = dataclasses.replace(media, grids=np.array(grids))
    for call in (
        lambda: model(tokens, media=wrong),
        lambda: model.forward(tokens, media=wrong),
        lambda: k3jax.next_token_loss(model, tokens, media=wrong),
        lambda: k3jax.trace(model, tokens, media=wrong),
        lambda: k3jax.prefill(model, tokens, media=wrong),
        lambda: k3jax.generate(model, tokens, media=wrong, max_new_tokens=1),
    ):
        with pytest.raises(UserError, match=message):
            call()


def test_media_of_another_kind_is_refused(model, tokens, media):
    with pytest.raises(UserError, match=r"patches is \(48, 3, 4, 4\); .* reads \[L, 3, 2, 2\]"):
        model(tokens, media=dataclasses.replace(media, patches=np.zeros((48, 3, 4, 4))))
    with pytest.raises(UserError, match=r"media\.grids is \(3,\); expected \[N, 3\]"):
        model(tokens, media=dataclasses.replace(media, grids=GRIDS[0]))
    with pytest.raises(UserError, match=r"media\.grids holds float32; expected integers"):
        model(tokens, media=dataclasses.replace(media, grids=GRIDS.astype(np.float32)))
    with pytest.raises(UserError, match=r"media must be k3jax\.media\.Media, got ndarray"):
        model(tokens, media=media.patches)
    with pytest.raises(UserError, match="this model has no vision tower"):
        abstract_model(dataclasses.replace(CFG, vision=None))(tokens, media=media)
    blind = dataclasses.replace(CFG, media_placeholder_id=None)
    with pytest.raises(UserError, match=r"cfg\.media_placeholder_id is None"):
        abstract_model(blind)(tokens, media=media)


def test_mismatch_under_jit_gives_nan(model, tokens, media, logits_of):
    grown = grow_placeholders(tokens, media, placeholder_id=PLACEHOLDER)
    good = logits_of(model, grown.tokens, grown.segment_ids, media)
    assert np.isfinite(good[grown.segment_ids > 0]).all()
    fewer = grown.tokens.copy()
    fewer[1, 9] = 3
    assert np.isnan(logits_of(model, fewer, grown.segment_ids, media)).all()
    # As many features as placeholders, but the grids are none that the tower defines.
    for grids in ([[1, 2, 4], [2, 2, 2], [1, 5, 6]], [[5, 4, 6], [1, 2, 6]], [[4, 6, 6]]):
        padded = np.pad(np.array(grids, np.int32), [(0, 4 - len(grids)), (0, 0)])
        wrong = dataclasses.replace(media, grids=padded)
        assert int(wrong.num_features.sum()) == 9
        assert np.isnan(logits_of(model, grown.tokens, grown.segment_ids, wrong)).all()


def test_placeholders_are_no_targets(model, tokens, media):
    grown = grow_placeholders(tokens, media, placeholder_id=PLACEHOLDER)
    # Tokens and media are constants of the traced function: values are known, so they grow there.
    loss = quick_jit(lambda m: k3jax.next_token_loss(m, tokens, media=media))
    value, metrics = loss(model)
    mask = np.asarray(target_mask(grown.tokens, grown.segment_ids))
    is_text = mask & (grown.tokens[:, 1:] != PLACEHOLDER)
    assert mask.sum() == 6 + 10 and is_text.sum() == mask.sum() - 9
    assert int(metrics["num_targets"]) == is_text.sum()
    np.testing.assert_array_equal(np.asarray(metrics["token_losses"]) != 0, is_text)
    assert_close(value, np.asarray(metrics["token_losses"], np.float64).sum() / is_text.sum())


def test_text_programs_do_not_know_of_vision(tokens):
    def program(cfg):
        def run(model, tokens):
            logits, _, statistics = model.forward(tokens, statistics=True)
            return k3jax.next_token_loss(model, tokens)[0], logits, statistics

        lowered = jax.jit(run).lower(abstract_model(cfg), jnp.asarray(tokens))
        return lowered.as_text()

    text = dataclasses.replace(CFG, vision=None, media_placeholder_id=None)
    assert program(CFG) == program(text)


def test_trace_under_jit_has_the_capacities_of_media(media):
    shapes = jax.eval_shape(
        k3jax.trace,
        abstract_model(CFG),
        jax.ShapeDtypeStruct((2, 11), jnp.int32),
        None,
        jax.eval_shape(lambda: jax.tree.map(jnp.asarray, media)),
    )
    names = ("patch_embed", "vision_blocks", "vision_tower", "projector", "merged_embeddings")
    found = [shapes[name].shape for name in names]
    assert found == [(48, 12), (2, 48, 12), (12, 4, 12), (12, 24), (2, 11, 24)]


def test_data_parallel_loss_and_gradients_equal_one_device(model, media):
    tokens = prompt(4, 9)
    for position in ((0, 3), (0, 4), (1, 0), *((3, t) for t in range(1, 7))):
        tokens[position] = PLACEHOLDER
    ids = np.ones((4, 9), np.int32)
    ids[2, :3] = 0

    def total(model, tokens, ids, media):
        loss, metrics = k3jax.next_token_loss(model, tokens, ids, media, remat="full")
        return loss, metrics["token_losses"]

    run = quick_jit(jax.value_and_grad(total, has_aux=True))
    (loss, losses), gradients = run(model, tokens, ids, media)
    mesh = meshes.build_mesh(meshes.MeshShape(data=2, fsdp=2), jax.devices()[:4])
    rules = meshes.AxisRules()
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, rules.spec(("batch", "tokens")))
        whole = jax.NamedSharding(mesh, rules.spec(()))
        placed = jax.device_put((tokens, ids), rows)
        (found_loss, found_losses), found = run(
            jax.device_put(model, whole), *placed, jax.device_put(media, whole)
        )
        grown, _ = sys.modules["k3jax.model.media"].enter_media(
            CFG, jax.device_put(prompt(4, 9), rows), None, _no_items(media)
        )
    assert grown.sharding == rows
    assert_close(found_loss, loss, name="loss")
    assert_close(found_losses, losses, name="token losses")
    for (path, wanted), got in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(found), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert got.sharding.is_fully_replicated, name
        assert_close(got, wanted, gradient=True, name=name)


def _no_items(media: Media) -> Media:
    return dataclasses.replace(media, grids=np.zeros_like(media.grids))
