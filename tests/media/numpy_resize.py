"""Antialiased bicubic resizing of uint8 in numpy, as Pillow 11.3 defines it, to the bit.

Cubic kernel with a = -0.5, widened by the reduction factor; weights rounded to 22 fractional bits;
horizontal pass first; each pass rounded and clipped to uint8, and skipped when its size stays.
"""

import math

import numpy as np

BITS = 22


def cubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0.0


def resize_first_axis(pixels: np.ndarray, size: int) -> np.ndarray:
    """uint8 [n, ...] -> [size, ...]."""
    length = len(pixels)
    if length == size:
        return pixels
    scale = length / size
    wide = max(scale, 1.0)
    result = np.empty((size, *pixels.shape[1:]), np.uint8)
    for i in range(size):
        center = (i + 0.5) * scale
        begin = max(0, int(center - 2 * wide + 0.5))
        end = min(length, int(center + 2 * wide + 0.5))
        weights = [cubic((j - center + 0.5) * (1 / wide)) for j in range(begin, end)]
        total = sum(weights)
        fixed = [math.floor(abs(w / total) * 2**BITS + 0.5) * (1 if w > 0 else -1) for w in weights]
        mixed = np.tensordot(np.array(fixed, np.int64), pixels[begin:end].astype(np.int64), 1)
        result[i] = np.clip((mixed + 2 ** (BITS - 1)) >> BITS, 0, 255)
    return result


def resize(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """uint8 [H, W, channels] -> [height, width, channels]."""
    across = resize_first_axis(pixels.swapaxes(0, 1), width).swapaxes(0, 1)
    return resize_first_axis(across, height)


def resize_with_alpha(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """The same with alpha last: multiplied into the colours before, divided out after."""
    alpha = pixels[:, :, -1:].astype(np.int64)
    product = pixels[:, :, :-1] * alpha + 128
    colours = ((product >> 8) + product) >> 8
    both = resize(np.concatenate([colours, alpha], axis=2).astype(np.uint8), width, height)
    colours, alpha = both[:, :, :-1].astype(np.int64), both[:, :, -1:].astype(np.int64)
    divided = np.clip(255 * colours // np.maximum(alpha, 1), 0, 255)
    colours = np.where((alpha == 0) | (alpha == 255), colours, divided)
    return np.concatenate([colours, alpha], axis=2).astype(np.uint8)
