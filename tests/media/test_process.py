import base64
import io
import itertools
import struct
import urllib.parse
import zlib

import numpy as np
import pytest
from PIL import Image

import k3jax
from k3jax.errors import UserError
from k3jax.media import MediaConfig, process_media
from tests.media.drawings import draw, encoded, noise

PIXELS = draw(45, 33)
PNG = encoded(Image.fromarray(PIXELS))
BASE64 = base64.b64encode(PNG).decode()


def patches(item, **settings):
    return process_media([item], config=MediaConfig(**settings), buckets=False).patches


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that announces many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))


def test_every_kind_of_item_gives_the_same_patches(tmp_path):
    path = tmp_path / "picture"
    path.write_bytes(PNG)
    expected = patches(PIXELS)
    percent = f"data:image/png,{urllib.parse.quote_from_bytes(PNG)}"
    for item in (
        Image.fromarray(PIXELS),
        path,
        str(path),
        PNG,
        bytearray(PNG),
        memoryview(PNG),
        f"data:image/png;base64,{BASE64}",
        f"DATA:;base64,{urllib.parse.quote(BASE64[:60])}\n{BASE64[60:]}",
        percent,
        PIXELS[:, ::-1][:, ::-1],
    ):
        np.testing.assert_array_equal(patches(item), expected)


def test_grey_arrays_are_the_same_in_every_shape():
    grey = draw(45, 33, "L")
    alpha = np.concatenate([grey, np.full_like(grey, 255)], axis=2)
    for array in (grey[:, :, 0], grey, alpha, np.repeat(grey, 3, axis=2)):
        np.testing.assert_array_equal(patches(array), patches(Image.fromarray(grey[:, :, 0])))


def test_one_pixel_fills_one_padded_token():
    media = process_media([np.full((1, 1, 3), 255, np.uint8)], buckets=False)
    assert media.grids.tolist() == [[1, 2, 2]] and media.sizes.tolist() == [[1, 1]]
    assert (media.patches[0, :, 0, 0] == 1).all() and media.patches.sum() == 3 - (28 * 28 - 1) * 3


@pytest.mark.parametrize(("width", "height"), [(1, 9000), (9000, 1), (2, 40_000), (1, 70_000)])
def test_extreme_shapes_keep_to_the_limits(width, height):
    media = process_media([np.zeros((height, width, 3), np.uint8)], buckets=False)
    _, rows, columns = media.grids[0]
    assert max(rows, columns) == 512 and min(rows, columns) == 2
    assert media.sizes.tolist() == [[width, height]]


def test_orientation_is_as_stored_unless_asked_for():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    file = encoded(Image.fromarray(PIXELS), exif=exif)
    np.testing.assert_array_equal(patches(file), patches(PIXELS))
    turned = process_media([file], config=MediaConfig(apply_exif_orientation=True), buckets=False)
    assert turned.sizes.tolist() == [[33, 45]]
    np.testing.assert_array_equal(turned.patches, patches(np.rot90(PIXELS, -1)))


def test_animation_gives_its_first_frame():
    frames = [Image.fromarray(np.full((20, 20, 3), value, np.uint8)) for value in (50, 90, 130)]
    for file_format in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if file_format == "WEBP" else {}
        file = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
        np.testing.assert_array_equal(patches(file), patches(np.asarray(frames[0])))


def test_large_image_is_read_without_a_remark():
    """Pillow warns from 89 million pixels on; the released limits go on to 179 million."""
    image = Image.new("1", (12_000, 8_000))
    media = process_media([encoded(image)], buckets=False, config=MediaConfig(in_patch_limit=64))
    assert media.sizes.tolist() == [[12_000, 8_000]]


def test_other_means_are_subtracted_per_channel():
    mean, std = (0.48, 0.45, 0.4), (0.27, 0.26, 0.28)
    actual = patches(PIXELS[:28, :28], image_mean=mean, image_std=std)
    pixels = (PIXELS[:28, :28] / 255.0).astype(np.float32)
    pixels -= mean
    pixels *= 1.0 / np.array(std)
    np.testing.assert_array_equal(actual[0], pixels[:14, :14].transpose(2, 0, 1))
    np.testing.assert_array_equal(actual[3], pixels[14:, 14:].transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (b"no image at all", r"item 1 \(15 bytes\) is not an image in a known format"),
        (b"", r"item 1 \(0 bytes\) is empty"),
        (PNG[:400], r"item 1 \(400 bytes\) is not an image that can be read, or is cut short"),
        (encoded(Image.fromarray(noise(90, 90)), "JPEG")[:3000], "cut short"),
        (encoded(Image.fromarray(noise(90, 90)), "WEBP")[:3000], "item 1 .* is not an image"),
        (encoded(Image.fromarray(noise(90, 90)), "BMP")[:3000], "cut short"),
        (encoded(Image.fromarray(noise(90, 90)), "TIFF")[:3000], "item 1 .* is not an image"),
        (bomb(50_000, 50_000), r"item 1 \(\d+ bytes\): .*decompression bomb"),
        (bomb(12_000, 9_000), "cut short"),  # large, but within the limit
        (bomb(1000, 1000), "cut short"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "EPS is a program"),
        ("no/such/file.png", r"item 1 \(no/such/file.png\): No such file"),
        (".", r"item 1 \(\.\) is not a file"),
        ("nul\0byte.png", "item 1 .*null byte|item 1 .*null character"),
        ("x" * 5000, r"item 1 \(\.\.\.x{120}\): File name too long"),
        ("https://example.org/a.png", "addresses are not fetched"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64," + BASE64[:-5], "item 1 .data URL"),
        ("data:image/png;base64,", r"item 1 \(data URL\) is empty"),
        (None, "item 1 is a NoneType; expected an image"),
        ([PIXELS], "item 1 is a list; expected an image"),
        (PIXELS[:0], "item 1: 45x0 has no pixels"),
        (Image.new("RGB", (0, 7)), "item 1: 0x7 has no pixels"),
        (PIXELS[None], r"item 1 is an array \[1, 33, 45, 3\]; expected"),
        (PIXELS.transpose(2, 0, 1), r"item 1 is an array \[3, 33, 45\]; expected"),
        (np.zeros(5, np.uint8), "expected"),
        (PIXELS / 255, "item 1 is an array of float64; images are uint8"),
        (np.full((3, 3), np.nan), "float64, not all finite"),
        (PIXELS.astype(np.uint16), "item 1 is an array of uint16"),
        (np.zeros((3, 3), bool), "item 1 is an array of bool"),
        (np.array(["a"]), "item 1 is an array of <U1"),
        (Image.fromarray(np.full((3, 3), np.inf, np.float32)), "item 1 holds values that are not"),
        (Image.new("La", (3, 3)), "item 1 has mode La, which does not convert to RGB"),
    ],
    ids=itertools.count(),
)
def test_bad_item_is_refused_by_name(item, words):
    with pytest.raises(UserError, match=words):
        process_media([PIXELS, item])


@pytest.mark.parametrize(
    "item", [PIXELS, PNG, Image.fromarray(PIXELS)], ids=["array", "bytes", "PIL"]
)
def test_more_pixels_than_allowed_are_refused(item):
    with pytest.raises(UserError, match="45x33 is more than max_pixels=1484; shrink it, or raise"):
        process_media([item], config=MediaConfig(max_pixels=1484))
    assert len(patches(item, max_pixels=1485)) == 16


@pytest.mark.parametrize("items", [PIXELS, "picture.png", PNG, Image.fromarray(PIXELS), None, 7])
def test_anything_but_a_list_is_refused(items):
    with pytest.raises(UserError, match=r"pass a list, e\.g\. \[image\]"):
        process_media(items)


def test_no_item_is_refused():
    with pytest.raises(UserError, match="items is empty; for text alone leave media=None"):
        process_media([])


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "ICO"])
def test_damaged_files_raise_nothing_else(file_format):
    """Whole files with a few bytes changed, and files cut anywhere: an image or a UserError."""
    whole = encoded(Image.fromarray(noise(30, 30)), file_format)
    rng = np.random.default_rng(0)
    for _ in range(40):
        damaged = bytearray(whole[: rng.integers(1, len(whole) + 1)])
        for _ in range(rng.integers(0, 4)):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        try:
            media = process_media([bytes(damaged)], config=MediaConfig(max_pixels=100_000))
        except UserError as error:
            assert str(error).startswith(f"item 0 ({len(damaged)} bytes)")
        else:
            assert np.isfinite(media.patches).all()


def test_callers_image_and_settings_stay_as_they_were():
    image = Image.open(io.BytesIO(PNG))
    mode, size = image.mode, image.size
    process_media([image, image], config=MediaConfig(in_patch_limit=4))
    assert (image.mode, image.size) == (mode, size)
    np.testing.assert_array_equal(np.asarray(image), PIXELS)


def test_public_names_are_those_of_the_package():
    assert k3jax.process_media is process_media
