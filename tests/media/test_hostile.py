"""Settings, sources and containers of odd types and values: refused by name, never a crash."""

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from k3jax.errors import UserError, describe
from k3jax.media import Media, MediaConfig, TransparentBackground, Video, process_media
from k3jax.media.checks import check_media
from tests.media.drawings import draw
from tests.vision_cases import seeing

HUGE = 10**5000
SIDE = seeing().vision.patch_size


@pytest.mark.parametrize(
    "url", ["data:,\ud800", "data:;base64,\ud800", "data:;base64,é"], ids=range(3)
)
def test_data_urls_of_no_text_are_refused(url):
    with pytest.raises(UserError, match="item 0"):
        process_media([url])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_mean", None),
        ("image_mean", ("a", "b", "c")),
        ("image_mean", (0.5, 0.5, HUGE)),
        ("image_mean", (1e39, 0.5, 0.5)),
        ("image_std", "abc"),
        ("image_std", 0.5),
        ("image_std", (0.5, 0.5, 1e-39)),
        ("image_std", (0.5, 0.5, 5e-324)),
        ("sample_fps", "x"),
        ("sample_fps", None),
        ("sample_fps", HUGE),
        ("patch_size", -HUGE),
        ("max_pixels", HUGE),
        ("transparent_bg_config", 3),
        ("transparent_bg_fill_stage", HUGE),
    ],
    ids=describe,
)
def test_wrong_settings_are_refused_by_name(name, value):
    with pytest.raises(UserError, match=name):
        MediaConfig(**{name: value})


def test_wrong_backgrounds_are_refused_by_name():
    for name in ("pattern", "chessboard_square_size", "chessboard_white_value"):
        with pytest.raises(UserError, match=name):
            TransparentBackground(**{name: HUGE})


@pytest.mark.parametrize(
    ("document", "named"),
    [
        (3, "preprocessor_config"),
        (None, "preprocessor_config"),
        ({"media_proc_cfg": 3}, "media_proc_cfg must"),
        ({"media_proc_cfg": {"transparent_bg_config": 3}}, "transparent_bg_config must"),
        ({"media_proc_cfg": {"a": 1, 3: 4}}, "unknown keys 3, a"),
        ({"fixed_output_tokens": HUGE}, "fixed_output_tokens"),
    ],
    ids=describe,
)
def test_documents_of_another_form_are_refused(document, named):
    with pytest.raises(UserError, match=named):
        MediaConfig.from_hf(document)


def test_numbers_of_numpy_and_small_deviations_are_read():
    config = MediaConfig(image_std=np.float32([1e-37] * 3), sample_fps=np.float32(4))
    assert np.isfinite(process_media([draw(28, 28)], config=config).patches).all()


@pytest.mark.parametrize("frames", [np.zeros(()), {"a": 1}, 5, "ab", {1, 2}, list, iter([])])
def test_frames_that_are_no_list_are_refused(frames):
    with pytest.raises(UserError, match="frames is a"):
        process_media([Video(frames=frames)])


@pytest.mark.parametrize("fps", ["x", HUGE, float("nan"), 0], ids=describe)
def test_rates_that_are_no_number_are_refused(fps):
    with pytest.raises(UserError, match="fps="):
        Video(frames=[draw(28, 28)], fps=fps)


@pytest.mark.parametrize("mode", ["L", "1", "I", "I;16", "P"])
@pytest.mark.parametrize("stage", ["before_resize", "after_resize"])
def test_broken_transparency_is_refused_and_none_ignored(mode, stage):
    config = MediaConfig(transparent_bg_fill_stage=stage)
    grey = draw(30, 28, "L")[:, :, 0]
    image = Image.fromarray(grey.astype(np.uint16) if mode == "I;16" else grey)
    image = image if mode == "I;16" else image.convert(mode)
    plain = process_media([image], config=config)
    image.info["transparency"] = None
    np.testing.assert_array_equal(process_media([image], config=config).patches, plain.patches)
    broken = ["red", 10**30] if mode == "P" else [b"\x00\x01", "red", 10**30]
    for value in broken:
        image.info["transparency"] = value
        with pytest.raises(UserError, match="item 0"):
            process_media([image], config=config)


def media(length=16, grids=((0, 0, 0),), patches=None) -> Media:
    patches = np.zeros((length, 3, SIDE, SIDE), np.float32) if patches is None else patches
    return Media(patches=patches, grids=grids, sizes=np.zeros((1, 2), np.int32))


def test_containers_too_small_for_any_item_are_refused():
    vision = seeing().vision
    grids = jnp.zeros((1, 3), jnp.int32)
    for length in range(4):
        with pytest.raises(UserError, match="leave media=None"):
            check_media(media(length, grids), vision)
    check_media(media(4, grids), vision)


def test_containers_of_lists_are_refused_by_name():
    vision = seeing().vision
    with pytest.raises(UserError, match=r"media\.grids is a list"):
        check_media(media(grids=[[1, 2, 2]]), vision)
    with pytest.raises(UserError, match=r"media\.patches is a list"):
        check_media(media(grids=np.zeros((1, 3), np.int32), patches=[1.0]), vision)


def test_a_configuration_of_another_type_and_a_missing_video_are_named(tmp_path):
    with pytest.raises(UserError, match="config is a dict; pass a k3jax"):
        process_media([Image.new("RGB", (28, 28))], config={"patch_size": 14})
    with pytest.raises(UserError, match=r"item 0 .*missing\.mp4.*No such file"):
        process_media([str(tmp_path / "missing.mp4")])
