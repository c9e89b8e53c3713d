import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from k3jax.media import MediaConfig, TransparentBackground
from k3jax.media.resize import render
from k3jax.media.sizes import ResizePlan, plan_resize
from tests.media import numpy_resize
from tests.media.drawings import draw, noise

CONFIG = MediaConfig()


def rendered(image, width, height, config=CONFIG):
    return render(image, ResizePlan(width, height, 0, 0, 0, 0), config, "image")


def test_noise_31x9001_equals_horizontal_pass_first():
    """Black and white noise, of which every value is clipped somewhere on the way."""
    pixels = np.where(noise(31, 9001) < 128, 0, 255).astype(np.uint8)
    plan = plan_resize(31, 9001, CONFIG, patch_limit=CONFIG.in_patch_limit)
    actual = render(Image.fromarray(pixels), plan, CONFIG, "image")
    expected = numpy_resize.resize(pixels, plan.width, plan.height)
    np.testing.assert_array_equal(actual[: plan.height, : plan.width], expected)
    turned = numpy_resize.resize(pixels.swapaxes(0, 1), plan.height, plan.width).swapaxes(0, 1)
    assert np.abs(expected.astype(int) - turned).max() > 10  # the order does show


@settings(max_examples=40, deadline=None)
@given(
    sides=st.tuples(*[st.integers(1, 60)] * 2),
    shrink=st.tuples(*[st.floats(0.01, 1.0)] * 2),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 9),
)
def test_any_size_equals_two_rounded_passes(sides, shrink, channels, seed):
    pixels = noise(*sides, channels, seed)
    width, height = (max(1, int(side * part)) for side, part in zip(sides, shrink))
    image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
    expected = np.broadcast_to(numpy_resize.resize(pixels, width, height), (height, width, 3))
    np.testing.assert_array_equal(rendered(image, width, height), expected)


@pytest.mark.parametrize("channels", [2, 4])
@pytest.mark.parametrize("size", [(57, 40), (20, 61), (33, 17), (57, 61)])
def test_transparency_equals_premultiplied_passes_over_the_board(channels, size):
    pixels = noise(57, 61, channels)
    pixels[:20, :, -1] = 0
    pixels[20:30, :, -1] = 255
    is_kept = size == (57, 61)
    resized = pixels if is_kept else numpy_resize.resize_with_alpha(pixels, *size)
    height, width = resized.shape[:2]
    alpha = resized[:, :, -1:].astype(np.float32) / np.float32(255)
    board = np.empty((height, width, 1), np.uint8)
    for y in range(height):
        for x in range(width):
            board[y, x] = 180 if (y // 8 + x // 8) % 2 else 255
    expected = (alpha * resized[:, :, :-1] + (1 - alpha) * board).astype(np.uint8)
    expected = np.broadcast_to(expected, (height, width, 3))
    np.testing.assert_array_equal(rendered(Image.fromarray(pixels), *size), expected)


def test_background_before_resizing_is_resized_with_the_image():
    image = Image.new("RGBA", (32, 32), (9, 9, 9, 0))
    for background, value in (("white", 255), ("gray", 128), ("black", 0)):
        config = MediaConfig(
            transparent_bg_config=TransparentBackground(pattern=background),
            transparent_bg_fill_stage="before_resize",
        )
        assert (rendered(image, 16, 16, config) == value).all()
    config = MediaConfig(transparent_bg_fill_stage="before_resize")
    assert len(np.unique(rendered(image, 16, 16, config))) > 2  # edges of squares are mixed
    config = MediaConfig(transparent_bg_config=None)
    assert (rendered(image, 16, 16, config) == 0).all()  # premultiplied colour is gone


def test_palettes_and_bits_are_resized_to_the_nearest_pixel():
    image = Image.fromarray(draw(40, 30)).quantize(16)
    expected = np.asarray(image.convert("RGB"))[1::3, 1::2]
    np.testing.assert_array_equal(rendered(image, 20, 10), expected)
    bits = Image.fromarray(draw(40, 30)).convert("1")
    assert set(np.unique(rendered(bits, 20, 10))) == {0, 255}


@pytest.mark.parametrize("kind", [bytes, int])
def test_transparent_palette_entries_show_the_board(kind):
    image = Image.new("P", (16, 16), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    image.info["transparency"] = bytes([255, 0]) if kind is bytes else 1
    actual = rendered(image, 16, 16)
    assert (actual[:8, :8] == 255).all() and (actual[:8, 8:] == 180).all()


def test_palette_with_alpha_is_never_mixed_by_index():
    image = Image.fromarray(np.full((8, 8, 4), (10, 200, 30, 255), np.uint8)).convert("PA")
    assert np.abs(rendered(image, 4, 4).astype(int) - (10, 200, 30)).max() < 30


def test_deep_greyscale_is_cut_not_scaled():
    values = np.array([[0, 7, 255, 256, 65535]], np.uint16)
    cut = [0, 7, 255, 255, 255]
    for image in (
        Image.fromarray(values),
        Image.fromarray(values.astype(np.int32)),
        Image.fromarray(values.astype(np.float32)),
    ):
        actual = rendered(image, 5, 1)
        np.testing.assert_array_equal(actual[0], np.repeat(cut, 3).reshape(5, 3))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV"])
def test_other_colour_spaces_are_resized_as_stored(mode):
    image = Image.fromarray(draw(40, 30)).convert(mode)
    bands = [np.asarray(band)[:, :, None] for band in image.split()]
    resized = [numpy_resize.resize(band, 17, 12)[:, :, 0] for band in bands]
    expected = Image.merge(mode, [Image.fromarray(band) for band in resized]).convert("RGB")
    np.testing.assert_array_equal(rendered(image, 17, 12), np.asarray(expected))
