"""Pictures and videos to the patches, grids and sizes that the model reads."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from k3jax.errors import UserError
from k3jax.media.buckets import bucket_media
from k3jax.media.config import MediaConfig
from k3jax.media.container import Media
from k3jax.media.image import open_image
from k3jax.media.patches import cut_patches, normalise_into
from k3jax.media.resize import render
from k3jax.media.sizes import ResizePlan, plan_resize
from k3jax.media.sources import is_video_source
from k3jax.media.video import Video, sample_frames


class _Piece(NamedTuple):
    """One item of `Media`: an image, or a chunk of a video."""

    patches: np.ndarray  # uint8 [frames * rows * columns, 3, P, P]
    grid: tuple[int, int, int]
    size: tuple[int, int]


def process_media(
    items: Sequence[Any], *, config: MediaConfig | None = None, buckets: bool = True
) -> Media:
    """Processes images and videos as the released processor does.

    Every image is one item; every video one item per chunk of 4 sampled frames (the last chunk
    may be shorter), so a prompt needs as many placeholders, in order.

    Args:
        items: each a `PIL.Image.Image`; a uint8 array [H, W] or [H, W, 1 | 2 | 3 | 4]; a path; a
            data URL; the bytes of a file; or a `Video`. A path or data URL of a video type counts
            as `Video(file=...)`. Of an animated file the first frame is taken.
        config: settings; None takes the released ones.
        buckets: round L and N up to a few static shapes, so that few programs are compiled.
            False gives the true numbers.

    Returns:
        `Media` of numpy arrays. `sizes` are those before resizing, which prompts state.

    Raises:
        UserError: there is no item, or one cannot be read; the message names its index and file.
    """
    config = MediaConfig() if config is None else config
    if not isinstance(config, MediaConfig):
        raise UserError(f"config is a {type(config).__name__}; pass a k3jax.MediaConfig")
    single = str | bytes | os.PathLike | Image.Image | np.ndarray | Video
    if isinstance(items, single) or not isinstance(items, Sequence):
        raise UserError(f"items is a {type(items).__name__}; pass a list, e.g. [image]")
    if not items:
        raise UserError("items is empty; for text alone leave media=None")
    pieces = [
        piece
        for index, item in enumerate(items)
        for piece in _process_item(item, f"item {index}", config)
    ]
    lengths = [len(piece.patches) for piece in pieces]
    patches = np.empty((sum(lengths), *pieces[0].patches.shape[1:]), np.float32)
    for end, piece in zip(np.cumsum(lengths), pieces):
        normalise_into(patches[end - len(piece.patches) : end], piece.patches, config)
    grids = np.array([piece.grid for piece in pieces], np.int32)
    sizes = np.array([piece.size for piece in pieces], np.int32)
    if buckets:
        return bucket_media(patches, grids, sizes)
    return Media(patches=patches, grids=grids, sizes=sizes)


def placeholder_text(size: Sequence[int]) -> str:
    """The prompt of an image of `size` (width, height) before resizing, one placeholder long."""
    width, height = size
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


def _process_item(item: Any, name: str, config: MediaConfig) -> Iterator[_Piece]:
    if is_video_source(item):
        item = Video(file=item)
    if isinstance(item, Video):
        yield from _process_video(item, name, config)
        return
    image = open_image(item, name, config)
    plan = plan_resize(*image.size, config, patch_limit=config.in_patch_limit)
    yield _piece([render(image, plan, config, name)], plan, image.size, config)


def _process_video(video: Video, name: str, config: MediaConfig) -> Iterator[_Piece]:
    """All frames take the size planned for the first one."""
    num_frames, frames = sample_frames(video, name, config)
    plan, size, chunk = None, None, []
    for frame_name, frame in frames:
        image = open_image(frame, frame_name, config)
        if plan is None:
            size = image.size
            plan = plan_resize(*size, config, patch_limit=config.in_patch_limit_each_frame)
            _check_video(num_frames, plan, name, config)
        chunk.append(render(image, plan, config, frame_name))
        if len(chunk) == config.temporal_merge_kernel_size:
            yield _piece(chunk, plan, size, config)
            chunk = []
    if chunk:
        yield _piece(chunk, plan, size, config)


def _check_video(num_frames: int, plan: ResizePlan, name: str, config: MediaConfig) -> None:
    if num_frames * plan.num_patches > config.max_video_patches:
        raise UserError(
            f"{name}: {num_frames} frames of {plan.num_patches} patches are more than "
            f"max_video_patches={config.max_video_patches}; cut the video, or change "
            "MediaConfig(sample_fps=..., in_patch_limit_each_frame=..., max_video_patches=...)"
        )


def _piece(
    frames: list[np.ndarray], plan: ResizePlan, size: tuple[int, int], config: MediaConfig
) -> _Piece:
    grid = (len(frames), plan.rows, plan.columns)
    return _Piece(cut_patches(np.stack(frames), config.patch_size), grid, size)
