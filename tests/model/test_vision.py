"""Tower and projector against their definition in float64, whatever the packing."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.checkpoint.names import placements
from k3jax.checkpoint.vision_names import vision_placements
from k3jax.config import K3Config
from k3jax.media import Media, grow_placeholders
from k3jax.model.vision import VisionTower
from k3jax.nn.parameters import named_variables
from k3jax.nn.vision import Projector
from tests.model.numpy_model import NumpyModel
from tests.model.numpy_vision import NumpyVision
from tests.released_files import random_tensors, write_checkpoint
from tests.small_configs import quick_jit, random_tokens, relative_error
from tests.tolerances import assert_close
from tests.vision_cases import GRIDS, PLACEHOLDER, random_media, seeing, take_item

CFG = seeing()


def see(model, media, **options):
    rows, is_valid, _ = model.vision(media, **options)
    return rows, model.projector(rows), is_valid


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(CFG)


@pytest.fixture(scope="module")
def model(tensors, tmp_path_factory):
    return k3jax.load_hf(write_checkpoint(tmp_path_factory.mktemp("seeing"), CFG, tensors))


@pytest.fixture(scope="module")
def media():
    return random_media(CFG)


@pytest.fixture(scope="module")
def seen(model, media):
    return quick_jit(see)(model, media)


def test_mixed_sizes_equal_the_definition(model, tensors, media, seen):
    rows, features, is_valid = seen
    assert is_valid
    definition = NumpyVision(CFG, tensors)
    count = int(media.num_features.sum())
    expected = definition.features(media.patches, media.grids)
    assert relative_error(features[:count], expected) <= 1e-5
    expected = [definition.tower(*take_item(media, i)[:1], g) for i, g in enumerate(media.grids)]
    assert relative_error(rows[:count], np.concatenate(expected)) <= 1e-5
    assert not np.any(rows[count:])


def test_items_and_buckets_do_not_touch_each_other(model, media, seen):
    """One item at a time, behind it zeros, NaN or an earlier use of the memory."""
    run = quick_jit(see)
    features = np.split(np.asarray(seen[1]), np.cumsum(media.num_features))
    for number in range(len(GRIDS)):
        patches, grid = take_item(media, number)
        alone = np.full((140, *patches.shape[1:]), np.nan if number % 2 else 3.0, np.float32)
        alone[: len(patches)] = patches
        grids = np.concatenate([grid, np.zeros((2, 3), np.int32)])
        rows, found, is_valid = run(model, Media(patches=alone, grids=grids, sizes=grids[:, 1:]))
        count = int(media.num_features[number])
        assert is_valid
        assert_close(found[:count], features[number], name=f"item {number}")
        assert np.isfinite(rows).all() and not np.any(rows[count:])


def test_one_program_serves_every_mix_of_sizes(model):
    run = quick_jit(lambda model, media: see(model, media)[1])
    for grids in ([[1, 2, 2]], [[3, 2, 4], [1, 4, 4]], [[1, 8, 2], [1, 2, 8], [1, 2, 4]]):
        run(model, random_media(CFG, grids, num_patches=48, items=4))
    assert run._cache_size() == 1


def test_gradients_equal_differences_of_the_definition(model, tensors, media, tmp_path):
    """Along a random direction of each parameter, through features of weighted sum."""
    capacity = media.feature_capacity
    real = int(media.num_features.sum())
    weights = np.random.default_rng(3).standard_normal((capacity, CFG.dim))

    def objective(model):
        return (see(model, media)[1] * weights).sum()

    gradients = named_variables(quick_jit(jax.grad(objective))(model))
    released = [placement.released for placement in vision_placements(CFG)]
    directions = random_tensors(CFG, seed=8)
    placed = k3jax.load_hf(write_checkpoint(tmp_path, CFG, directions))
    directed = named_variables(placed)
    by_variable: dict[str, list[str]] = {}
    for placement in vision_placements(CFG):
        by_variable.setdefault(placement.variable, []).append(placement.released)

    def value(names, step):
        changed = {n: np.asarray(tensors[n], np.float64) for n in released}
        changed |= {n: changed[n] + step * directions[n] for n in names}
        features = NumpyVision(CFG, changed).features(media.patches, media.grids)
        return (features * weights[:real]).sum()

    step = 1e-5
    for variable, names in by_variable.items():
        expected = (value(names, step) - value(names, -step)) / (2 * step)
        found = (np.asarray(gradients[variable], np.float64) * directed[variable][...]).sum()
        scale = np.linalg.norm(gradients[variable]) * np.linalg.norm(directed[variable][...])
        assert abs(found - expected) <= 1e-5 * scale, variable
    text = [name for name in gradients if name.startswith("language.")]
    assert not any(np.any(gradients[name]) for name in text)


def squares(model, media, **options):
    return jnp.square(see(model, media, **options)[1][:10]).sum()


@pytest.fixture(scope="module")
def gradients(model, media):
    return quick_jit(jax.grad(squares))(model, media)


@pytest.mark.parametrize("options", [{"remat": "full"}, {"remat": "dots", "scan": False}], ids=str)
def test_recomputation_and_written_out_layers_change_nothing(model, media, gradients, options):
    found = quick_jit(jax.grad(functools.partial(squares, **options)))(model, media)
    for wanted, got in zip(jax.tree.leaves(gradients), jax.tree.leaves(found), strict=True):
        assert_close(got, wanted, gradient=True)


def test_model_with_media_equals_the_definition(model, tensors):
    """Text after pictures: features stand in rows behind the embedding table."""
    grids = [[1, 4, 2], [2, 2, 6]]
    media = random_media(CFG, grids, num_patches=40, items=3)
    features = NumpyVision(CFG, tensors).features(media.patches[:32], np.array(grids))
    tokens = np.array(random_tokens(CFG, 1, 9))
    tokens[tokens == PLACEHOLDER] = 1
    tokens[0, [2, 6]] = PLACEHOLDER
    tokens[0, 4] = CFG.pad_id
    grown = grow_placeholders(tokens, media, placeholder_id=PLACEHOLDER)
    run = quick_jit(lambda model, tokens, media: model(tokens, media=media))
    found = run(model, grown.tokens, media)

    table = tensors["model.embed_tokens.weight"].astype(np.float64)
    extended = np.concatenate([table, features])
    extended[CFG.pad_id] = 0
    ids = list(tokens[0])
    ids[6:7] = [len(table) + 2 + i for i in range(3)]
    ids[2:3] = [len(table) + i for i in range(2)]
    definition = NumpyModel(CFG, tensors | {"model.embed_tokens.weight": extended})
    assert relative_error(found[0], definition.run(np.array(ids))) <= 1e-5


def test_vision_tensors_have_one_place_each():
    names = [placement.released for placement in placements(CFG)]
    assert len(names) == len(set(names))
    text = dataclasses.replace(CFG, vision=None, media_placeholder_id=None)
    vision = set(names) - {placement.released for placement in placements(text)}
    assert all(name.startswith(("vision_tower.", "mm_projector.")) for name in vision)
    assert len(vision) == 2 + 6 * CFG.vision.num_layers + 1 + 3


def released_size(seed: int) -> tuple[K3Config, dict, VisionTower, Projector]:
    """Tower and projector of the release without its text model, on random tensors."""
    cfg = K3Config.kimi_k3()
    random = np.random.default_rng(seed)
    tensors, arrays = {}, {}
    parts = jax.eval_shape(
        lambda key: {"vision": VisionTower(cfg, key), "projector": Projector(cfg, key)},
        jax.random.key(0),
    )
    variables = named_variables(parts)
    for placement in vision_placements(cfg):
        z = random.standard_normal(placement.shape, np.float32)
        if "norm" in placement.released:
            z = 1 + np.float32(0.2) * z
        elif "pos_emb" not in placement.released:
            z *= np.float32(1.2 * np.prod(placement.shape[1:]) ** -0.5)
        tensors[placement.released] = z
        shape = variables[placement.variable].shape
        array = arrays.setdefault(placement.variable, np.empty(shape, np.float32))
        own = z.reshape(len(z), -1).T if placement.layout == "matrix" else z
        array[placement.index] = own.reshape(shape[len(placement.index) :])
    leaves, treedef = jax.tree.flatten(parts)
    assert len(leaves) == len(variables)
    placed = jax.tree.unflatten(treedef, [jnp.asarray(arrays[name]) for name in variables])
    return cfg, tensors, placed["vision"], placed["projector"]


@pytest.mark.slow
def test_released_size_equals_the_definition_on_a_picture():
    cfg, tensors, tower, projector = released_size(seed=1)
    media = random_media(cfg, [[1, 32, 32]])  # 448 x 448

    @jax.jit
    def run(tower, projector, media):
        rows, _, _ = tower(media)
        return rows, projector(rows)

    start = time.perf_counter()
    rows, features = jax.block_until_ready(run(tower, projector, media))
    print(f"released tower, 448 x 448: {time.perf_counter() - start:.1f} s with compilation")
    start = time.perf_counter()
    jax.block_until_ready(run(tower, projector, media))
    print(f"released tower, 448 x 448: {time.perf_counter() - start:.1f} s")
    definition = NumpyVision(cfg, tensors)
    expected = definition.tower(media.patches, media.grids[0])
    errors = relative_error(rows, expected), relative_error(features, definition.project(expected))
    print(f"relative error of tower and projector: {errors[0]:.1e}, {errors[1]:.1e}")
    assert max(errors) <= 1e-4
