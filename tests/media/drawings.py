"""Test pictures: the formula of the golden data, and noise."""

import io

import numpy as np
from PIL import Image

CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}


def draw(width: int, height: int, mode: str = "RGB", seed: int = 0) -> np.ndarray:
    """uint8 [H, W, channels]; the last channel of LA and RGBA is alpha."""
    x, y = np.arange(width, dtype=np.int32), np.arange(height, dtype=np.int32)[:, None]
    pixels = np.empty((height, width, CHANNELS[mode]), np.uint8)
    for c in range(CHANNELS[mode]):
        value = x * (3 + c) + y * (5 + 2 * c) + x * y // (7 + c) + seed * (11 + c)
        pixels[:, :, c] = value * 37 // 8 % 256
    return pixels


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 [H, W, channels] of random values."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image: Image.Image, file_format: str = "PNG", **options) -> bytes:
    """Bytes of a file that holds the image."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()
