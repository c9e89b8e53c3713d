"""Patches and their values: uint8 pixels to float32 rows of the vision tower."""

import numpy as np

from k3jax.media.config import MediaConfig


def cut_patches(frames: np.ndarray, patch_size: int) -> np.ndarray:
    """uint8 [F, rows * P, columns * P, 3] -> [F * rows * columns, 3, P, P], row-major."""
    count, height, width, channels = frames.shape
    rows, columns = height // patch_size, width // patch_size
    grid = frames.reshape(count, rows, patch_size, columns, patch_size, channels)
    return grid.transpose(0, 1, 3, 5, 2, 4).reshape(-1, channels, patch_size, patch_size)


def normalise_into(out: np.ndarray, patches: np.ndarray, config: MediaConfig) -> None:
    """Writes (patches / 255 - mean) / std, each step rounded to float32.

    Args:
        out: float32 [L, 3, P, P], overwritten.
        patches: uint8 [L, 3, P, P].
        config: mean and standard deviation per channel.
    """
    table = normalisation_table(config)
    for channel in range(3):
        out[:, channel] = table[channel][patches[:, channel]]


def normalisation_table(config: MediaConfig) -> np.ndarray:
    """float32 [3, 256]: what each uint8 value of each channel becomes.

    The released arithmetic holds mean and 1 / std in float64 and rounds after each step.
    """
    table = np.tile((np.arange(256) / 255.0).astype(np.float32), (3, 1))
    table -= np.array(config.image_mean)[:, None]
    table *= 1.0 / np.array(config.image_std)[:, None]
    return table
