"""Settings of media processing, named as in the released `media_proc_cfg`, with its values."""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from k3jax.errors import UserError, describe

BackgroundPattern = Literal["white", "black", "gray", "chessboard"]
FillStage = Literal["before_resize", "after_resize"]

# Keys of released files that change no pixel here: prompts and frame counts of the predecessor's
# video processor. The released processor of this model reads images only.
_VIDEO_PROMPT_KEYS = {"timestamp_mode", "in_patch_limit_video", "max_num_frames_each_video"}
# Keys that must be null: the mode they turn on resizes every picture to one number of tokens.
_NULL_KEYS = {"fixed_output_tokens", "fixed_output_tokens_each_frame"}

_LARGEST = 3.4e38  # just below the largest float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransparentBackground:
    """What shows through transparent pixels; the values are those of the release."""

    pattern: BackgroundPattern = "chessboard"
    chessboard_square_size: int = 8
    chessboard_square_on_top_left: bool = True  # the square at the top left is white
    chessboard_white_value: int = 255
    chessboard_gray_value: int = 180

    def __post_init__(self):
        patterns = ("white", "black", "gray", "chessboard")
        if self.pattern not in patterns:
            raise UserError(
                f"pattern={describe(self.pattern)} must be one of {', '.join(patterns)}"
            )
        if not _is_count(self.chessboard_square_size):
            raise UserError(
                f"chessboard_square_size={describe(self.chessboard_square_size)} must be a "
                "positive integer"
            )
        for name in ("chessboard_white_value", "chessboard_gray_value"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= 255:
                raise UserError(f"{name}={describe(value)} must be an integer in 0..255")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """How pictures and video become patches; the defaults are the released values.

    Attributes:
        patch_size: pixels along a side of a patch, P.
        merge_kernel_size: patches along a side of a token; images are padded to P * this.
        in_patch_limit: patches of an image, counted before padding (and, as released, before
            rounding the sides, so that an image may end slightly above it).
        patch_limit_on_one_side: patches along one side, padding included.
        image_mean: per channel, subtracted from values in 0..1.
        image_std: per channel, divided by.
        in_patch_limit_each_frame: `in_patch_limit` of a frame of video.
        sample_fps: frames taken of a second of video.
        temporal_merge_kernel_size: consecutive frames in one item, F; the tower pools over them.
        transparent_bg_config: what lies behind transparent pixels; None drops alpha.
        transparent_bg_fill_stage: when it is put there.
        apply_exif_orientation: turn photos upright by their EXIF entry. The released processor
            does not, so pictures are read as they are stored unless this is set.
        max_pixels: pixels of an image before resizing, above which it is refused unread. The
            default is where Pillow, and so the released processor, takes a file for a bomb.
        max_video_patches: patches of all sampled frames of a video, above which it is refused
            (2.5 GB of float32 by default; not a released value).
    """

    patch_size: int = 14
    merge_kernel_size: int = 2
    in_patch_limit: int = 65536
    patch_limit_on_one_side: int = 512
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    in_patch_limit_each_frame: int = 16384
    sample_fps: float = 8.0
    temporal_merge_kernel_size: int = 4
    transparent_bg_config: TransparentBackground | None = dataclasses.field(
        default_factory=TransparentBackground
    )
    transparent_bg_fill_stage: FillStage = "after_resize"
    apply_exif_orientation: bool = False
    max_pixels: int = 178_956_970
    max_video_patches: int = 1 << 20

    def __post_init__(self):
        for name in ("image_mean", "image_std"):
            object.__setattr__(self, name, _three_numbers(getattr(self, name), name))
        if 0 in self.image_std:
            raise UserError(f"image_std={self.image_std} must not hold 0")
        for mean, std in zip(self.image_mean, self.image_std):
            centred = max(abs(mean), abs(1 - mean))
            if max(centred, centred / abs(std)) > _LARGEST:
                raise UserError(
                    f"image_mean={self.image_mean} and image_std={self.image_std} give values "
                    "beyond float32"
                )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and not _is_count(value):
                raise UserError(f"{field.name}={describe(value)} must be a positive integer")
        if self.merge_kernel_size != 2:
            raise UserError(f"merge_kernel_size={self.merge_kernel_size} must be 2")
        if self.patch_limit_on_one_side % 2:
            raise UserError(
                f"patch_limit_on_one_side={self.patch_limit_on_one_side} must be even, since "
                "sides are padded to even numbers of patches"
            )
        if not (is_number(self.sample_fps) and self.sample_fps > 0):
            raise UserError(f"sample_fps={describe(self.sample_fps)} must be a positive number")
        background = self.transparent_bg_config
        if background is not None and not isinstance(background, TransparentBackground):
            raise UserError(
                f"transparent_bg_config={describe(background)} must be a TransparentBackground or "
                "None"
            )
        if self.transparent_bg_fill_stage not in ("before_resize", "after_resize"):
            raise UserError(
                f"transparent_bg_fill_stage={describe(self.transparent_bg_fill_stage)} must be "
                "'before_resize' or 'after_resize'"
            )

    @classmethod
    def from_hf(cls, document: Mapping[str, Any]) -> "MediaConfig":
        """Reads a released `preprocessor_config.json`, or the `media_proc_cfg` in it.

        Raises:
            UserError: a key is unknown, or a value is not supported.
        """
        _expect_object(document, "preprocessor_config")
        values = document.get("media_proc_cfg", document)
        _expect_object(values, "media_proc_cfg")
        values = dict(values)
        for key in _NULL_KEYS & values.keys():
            value = values.pop(key)
            if value is not None:
                raise UserError(f"media_proc_cfg.{key}={describe(value)} must be null")
        for key in _VIDEO_PROMPT_KEYS & values.keys():
            del values[key]
        background = values.get("transparent_bg_config")
        if background is not None:
            _expect_object(background, "transparent_bg_config")
            _refuse_unknown(background, TransparentBackground, "transparent_bg_config")
            values["transparent_bg_config"] = TransparentBackground(**background)
        _refuse_unknown(values, cls, "media_proc_cfg")
        # The released code falls back to these two, unlike the released file.
        values.setdefault("transparent_bg_config", None)
        values.setdefault("transparent_bg_fill_stage", "before_resize")
        return cls(**values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**63


def is_number(value: Any) -> bool:
    """Whether `value` is a finite real number, as Python or NumPy write them."""
    try:
        is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return is_real and math.isfinite(value)
    except OverflowError:  # an integer beyond the floats
        return False


def _three_numbers(given: Any, name: str) -> tuple[float, float, float]:
    values = tuple(given) if isinstance(given, Iterable) else ()
    if len(values) != 3 or not all(map(is_number, values)):
        raise UserError(f"{name}={describe(given)} must be three finite numbers")
    return tuple(map(float, values))


def _expect_object(value: Any, where: str) -> None:
    if not isinstance(value, Mapping):
        raise UserError(f"{where} must be an object with settings, got {describe(value)}")


def _refuse_unknown(values: Mapping[str, Any], kind: type, where: str) -> None:
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(
        key if isinstance(key, str) else describe(key) for key in values.keys() - known
    )
    if unknown:
        raise UserError(f"{where} holds unknown keys {', '.join(unknown)}")
