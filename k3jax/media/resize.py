"""Resizing, transparency and padding: any Pillow image to uint8 RGB, as released to the bit."""

import functools

import numpy as np
from PIL import Image

from k3jax.errors import UserError, describe
from k3jax.media.config import MediaConfig, TransparentBackground
from k3jax.media.sizes import ResizePlan

# Alpha is multiplied into the colours before resizing, so that what cannot be seen has no say.
_PREMULTIPLIED = {"RGBA": "RGBa", "LA": "La"}
_PLAIN_PATTERNS = {"white": 255, "black": 0, "gray": 128}


def render(image: Image.Image, plan: ResizePlan, config: MediaConfig, name: str) -> np.ndarray:
    """Pixels of the padded image.

    Modes are treated as the released processor treats them, also where that is a pity:

    * resizing comes before conversion to RGB, so palettes and black-and-white images, whose values
      cannot be mixed, are resized to the nearest pixel, and CMYK as four channels;
    * greyscale of 16 and 32 bits and of floats is cut to 0..255, not scaled;
    * an RGB image whose file names one transparent colour shows that colour.

    Where it would fail or mix palette entries (palette with alpha), we convert to RGBA first.

    Args:
        image: any mode that Pillow converts to RGB.
        plan: of this size, or of a common size of several images.
        config: background and the stage at which it is filled.
        name: what messages call the item.

    Returns:
        uint8 [plan.height + pad_height, plan.width + pad_width, 3], black where padded.

    Raises:
        UserError: the mode has no conversion to RGB, or not with its entry `transparency`.
    """
    size = (plan.width, plan.height)
    try:
        if image.mode == "PA":
            image = image.convert("RGBA")
        if config.transparent_bg_fill_stage == "before_resize":
            image = _fill_background(image, config.transparent_bg_config)
        rgb = np.asarray(_fill_background(_resize(image, size), config.transparent_bg_config))
    except (ValueError, TypeError, OverflowError) as error:
        colour = image.info.get("transparency")
        stated = "" if colour is None else f" and info['transparency']={describe(colour)}"
        raise UserError(
            f"{name} has mode {image.mode}{stated}, which does not convert to RGB: {error}"
        ) from error
    padded = np.zeros((plan.height + plan.pad_height, plan.width + plan.pad_width, 3), np.uint8)
    padded[: plan.height, : plan.width] = rgb
    return padded


def _resize(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Bicubic, antialiased: horizontally, rounded and clipped to uint8, then vertically.

    One call per direction, since the order within one call differs between versions of Pillow. A
    direction whose size stays is skipped, as it is within one call.
    """
    if image.size == size:
        return image
    bicubic = Image.Resampling.BICUBIC
    if image.mode in ("1", "P"):  # by nearest pixel, in which the order does not show
        return image.resize(size, bicubic)
    mode = image.mode
    if mode in _PREMULTIPLIED:
        image = image.convert(_PREMULTIPLIED[mode])
    image = image.resize((size[0], image.height), bicubic).resize(size, bicubic)
    return image.convert(mode) if mode in _PREMULTIPLIED else image


def _fill_background(image: Image.Image, background: TransparentBackground | None) -> Image.Image:
    """RGB; alpha over the background is float32 arithmetic truncated to uint8."""
    if image.mode == "RGB":
        return image
    has_alpha = "A" in image.getbands() or image.info.get("transparency") is not None
    if not has_alpha:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    if background is None:
        return rgba.convert("RGB")
    rgba = np.asarray(rgba)
    alpha = rgba[:, :, 3:].astype(np.float32) / np.float32(255)
    behind = _paint(background, *rgba.shape[:2])
    return Image.fromarray((alpha * rgba[:, :, :3] + (1 - alpha) * behind).astype(np.uint8))


@functools.lru_cache(maxsize=4)
def _paint(background: TransparentBackground, height: int, width: int) -> np.ndarray:
    """[height, width, 1] uint8 of equal channels."""
    if background.pattern != "chessboard":
        return np.full((height, width, 1), _PLAIN_PATTERNS[background.pattern], np.uint8)
    side = background.chessboard_square_size
    square = np.arange(height)[:, None] // side + np.arange(width) // side
    is_white = square % 2 == (0 if background.chessboard_square_on_top_left else 1)
    board = np.where(
        is_white, background.chessboard_white_value, background.chessboard_gray_value
    ).astype(np.uint8)
    return board[:, :, None]
