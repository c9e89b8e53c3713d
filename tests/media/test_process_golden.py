"""Every number of the golden case of image processing, exactly."""

import hashlib

import numpy as np
import pytest

from k3jax.media import MediaConfig, placeholder_text, process_media
from k3jax.media.image import open_image
from k3jax.media.patches import normalisation_table
from k3jax.media.resize import render
from k3jax.media.sizes import plan_resize
from tests.golden_cases import golden_case
from tests.media.drawings import draw

CASE = golden_case("vision_processing")
CONFIG = MediaConfig.from_hf(CASE.facts)
IMAGES = CASE.facts["images"]


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()


def picture(fact: dict) -> np.ndarray:
    return draw(fact["width"], fact["height"], fact["mode"], fact["seed"])


def test_released_settings_are_the_defaults():
    assert MediaConfig() == CONFIG


@pytest.mark.parametrize("fact", IMAGES, ids=lambda f: f"{f['width']}x{f['height']}-{f['mode']}")
def test_image_equals_released(fact):
    pixels = picture(fact)
    assert digest(pixels) == fact["sha256_input"]
    plan = plan_resize(fact["width"], fact["height"], CONFIG, patch_limit=CONFIG.in_patch_limit)
    for name in ("pad_width", "pad_height", "num_tokens"):
        assert getattr(plan, name) == fact[name]
    assert (plan.width, plan.height) == (fact["new_width"], fact["new_height"])
    assert plan.num_patches == fact["patches"]

    padded = render(open_image(pixels, "image", CONFIG), plan, CONFIG, "image")
    assert digest(padded) == fact["sha256_resized_padded_uint8"]

    media = process_media([pixels], config=CONFIG, buckets=False)
    assert media.patches.dtype == np.float32
    assert media.grids.tolist() == [fact["grid_thw"]]
    assert placeholder_text(media.sizes[0]) == fact["prompt"]
    assert digest(media.patches) == fact["sha256_pixel_values_f32"]
    assert media.patches.reshape(-1)[: len(fact["first_values"])].tolist() == fact["first_values"]
    sample = CASE.arrays[f"{fact['index']}.sample_patch"]
    np.testing.assert_array_equal(media.patches[fact["sample_patch_index"]], sample)


def test_two_images_equal_released_and_are_bucketed():
    pair = CASE.facts["pair"]
    items = [picture(IMAGES[index]) for index in pair["indices"]]
    media = process_media(items, config=CONFIG, buckets=False)
    assert list(media.patches.shape) == pair["shape"]
    assert media.grids.tolist() == pair["grid_thws"]
    assert digest(media.patches) == pair["sha256_pixel_values_f32"]

    one = process_media([*items, items[0]], config=CONFIG)
    assert len(one.patches) == 80 and len(one.grids) == len(one.sizes) == 4
    np.testing.assert_array_equal(one.patches[:48], media.patches)
    assert not one.patches[72:].any() and not one.grids[3].any()


def test_normalisation_equals_released():
    table = CASE.arrays["normalisation_table"]
    np.testing.assert_array_equal(normalisation_table(CONFIG), np.tile(table, (3, 1)))


def test_table_of_sizes_equals_released():
    for width, height, *expected in CASE.facts["resize_table"]:
        plan = plan_resize(width, height, CONFIG, patch_limit=CONFIG.in_patch_limit)
        assert [*plan[:4], plan.num_tokens] == expected
