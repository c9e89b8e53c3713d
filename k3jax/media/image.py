"""Opens an image of any kind as a Pillow image, and refuses what is none."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps

from k3jax.errors import UserError
from k3jax.media.config import MediaConfig
from k3jax.media.sources import BytesSource, describe_source, open_source

# Filters of warnings are global to the process, so one thread at a time may change them.
_FILTERS = threading.Lock()


def open_image(item: Any, name: str, config: MediaConfig) -> Image.Image:
    """The decoded image behind an item, in the mode in which it is stored.

    A file with several frames gives its first one. Orientation stays as stored unless
    `config.apply_exif_orientation`.

    Args:
        item: `PIL.Image.Image`; uint8 array [H, W], [H, W, 1 | 2 | 3 | 4] (grey, grey and alpha,
            RGB, RGBA); path; data URL; or the bytes of a file.
        name: what messages call the item.
        config: limits and orientation.

    Raises:
        UserError: the item is none of these, cannot be read or decoded, or is too large or empty.
    """
    if isinstance(item, Image.Image):
        image = _decoded(item, name, config)
    elif isinstance(item, BytesSource):
        with open_source(item, name) as file:
            image = _opened(file, f"{name} ({describe_source(item)})", config)
    elif hasattr(item, "__array__"):
        image = _from_array(np.asarray(item), name, config)
    else:
        raise UserError(
            f"{name} is a {type(item).__name__}; expected an image (PIL, array, path, data URL or "
            "bytes) or k3jax.Video"
        )
    if image.mode == "F" and not np.isfinite(np.asarray(image)).all():
        raise UserError(f"{name} holds values that are not finite")
    return image


def _opened(file: BinaryIO, name: str, config: MediaConfig) -> Image.Image:
    with _quiet_pillow(), _refusing(name):
        image = Image.open(file)
        if image.format == "EPS":
            # Decoding would start an interpreter for a program that somebody else wrote.
            raise UserError("EPS is a program, not an image; render it first")
        return _finished(image, config)


def _decoded(image: Image.Image, name: str, config: MediaConfig) -> Image.Image:
    with _quiet_pillow(), _refusing(name):
        return _finished(image, config)


def _finished(image: Image.Image, config: MediaConfig) -> Image.Image:
    """Decodes; opening reads the header only, so the limits are checked before."""
    _check_size(*image.size, config)
    image.load()
    return ImageOps.exif_transpose(image) if config.apply_exif_orientation else image


def _from_array(array: np.ndarray, name: str, config: MediaConfig) -> Image.Image:
    if array.dtype != np.uint8:
        is_float = np.issubdtype(array.dtype, np.inexact)
        broken = is_float and not np.isfinite(array).all()
        raise UserError(
            f"{name} is an array of {array.dtype}{', not all finite' if broken else ''}; images "
            "are uint8 in 0..255 (scale, round and convert it, so that the range is yours)"
        )
    if array.ndim != 2 and not (array.ndim == 3 and 1 <= array.shape[2] <= 4):
        raise UserError(
            f"{name} is an array {list(array.shape)}; expected [H, W] or [H, W, channels] with "
            "1 to 4 channels last, or k3jax.Video(frames=...) for several frames"
        )
    with _refusing(name):
        _check_size(array.shape[1], array.shape[0], config)
    if array.shape[2:] == (1,):
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array))


def _check_size(width: int, height: int, config: MediaConfig) -> None:
    if width < 1 or height < 1:
        raise UserError(f"{width}x{height} has no pixels")
    if width * height > config.max_pixels:
        raise UserError(
            f"{width}x{height} is more than max_pixels={config.max_pixels}; shrink it, or raise "
            "MediaConfig(max_pixels=...) if you trust its source"
        )


@contextlib.contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Decoders of hostile bytes may raise anything; all of it is the item's fault."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except Image.UnidentifiedImageError as error:
        raise UserError(
            f"{name} is not an image in a known format; for video pass k3jax.Video(file=...)"
        ) from error
    except Image.DecompressionBombError as error:
        raise UserError(
            f"{name}: {error} If you trust its source, raise PIL.Image.MAX_IMAGE_PIXELS and "
            "MediaConfig(max_pixels=...)"
        ) from error
    except Exception as error:
        raise UserError(
            f"{name} is not an image that can be read, or is cut short: "
            f"{error or type(error).__name__}"
        ) from error


@contextlib.contextmanager
def _quiet_pillow() -> Iterator[None]:
    """Silences remarks on odd files; what matters is raised instead.

    Among them is Pillow's warning of large images, for which `max_pixels` stands.
    """
    with _FILTERS, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL(\.|$)")
        yield
