"""Video: frames taken at a rate, in chunks of consecutive frames, one item per chunk.

The released processor of this model reads images only, while its tower and its published settings
know video. What happens here follows the public processor of its predecessor.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from k3jax.errors import UserError, describe
from k3jax.media.config import MediaConfig, is_number
from k3jax.media.sources import BytesSource, describe_source, open_source


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Video:
    """A video, by its frames or by a file.

    Attributes:
        frames: images as `process_media` takes them, or a uint8 array [frames, H, W, channels].
        file: path, data URL or bytes of a video file; reading it needs the extra `k3jax[video]`.
        fps: frames per second of `frames`; None means that they are sampled already, and all are
            used. A file knows its own.
    """

    frames: Sequence[Any] | np.ndarray | None = None
    file: BytesSource | None = None
    fps: float | None = None

    def __post_init__(self):
        if (self.frames is None) == (self.file is None):
            raise UserError("a Video has either frames or a file")
        if self.fps is not None and self.file is not None:
            raise UserError(
                f"fps={describe(self.fps)} goes with frames; a file states its own rate"
            )
        if self.fps is not None and not (is_number(self.fps) and self.fps > 0):
            raise UserError(f"fps={describe(self.fps)} must be a positive number")


def choose_frames(num_frames: int, fps: float | None, sample_fps: float) -> np.ndarray:
    """Ascending indices of the sampled frames, first and last included.

        n = max(1, round(num_frames min(sample_fps, fps) / fps)),
        round(linspace(0, num_frames - 1, n))

    Args:
        num_frames: at least 1.
        fps: None takes every frame.
        sample_fps: frames to take of a second; a slower video is not stretched.
    """
    if fps is None:
        return np.arange(num_frames)
    count = max(1, round(num_frames * min(sample_fps, fps) / fps))
    return np.linspace(0, num_frames - 1, count).round().astype(np.int64)


def sample_frames(
    video: Video, name: str, config: MediaConfig
) -> tuple[int, Iterator[tuple[str, Any]]]:
    """Number of sampled frames, and the frames one after another with their names.

    Raises:
        UserError: the video has no frame, cannot be read, or the decoder is not installed.
    """
    if video.file is not None:
        return _sample_file(video.file, name, config)
    frames = video.frames
    try:
        num_frames = -1 if isinstance(frames, str | bytes | Mapping) else len(frames)
    except TypeError:  # also an array without axes
        num_frames = -1
    if num_frames < 0 or not hasattr(frames, "__getitem__"):
        raise UserError(f"{name}: frames is a {type(frames).__name__}; pass a list of images")
    if not num_frames:
        raise UserError(f"{name} has no frames")
    chosen = choose_frames(num_frames, video.fps, config.sample_fps)
    return len(chosen), ((f"{name}, frame {index}", frames[index]) for index in chosen.tolist())


def _sample_file(
    source: BytesSource, name: str, config: MediaConfig
) -> tuple[int, Iterator[tuple[str, Any]]]:
    with open_source(source, name):  # a file that is missing is named before a decoder that is
        _decoder()
    # Containers state the number of frames wrongly or not at all, so they are counted.
    num_frames, fps = 0, None
    for number, (rate, _) in enumerate(_decode(source, name), start=1):
        num_frames, fps = number, rate
    named = f"{name} ({describe_source(source)})"
    if not num_frames:
        raise UserError(f"{named} has no frames")
    if fps is None:
        raise UserError(f"{named} states no frame rate; pass Video(frames=..., fps=...)")
    chosen = choose_frames(num_frames, fps, config.sample_fps)

    def frames() -> Iterator[tuple[str, Any]]:
        wanted = set(chosen.tolist())
        for index, (_, frame) in enumerate(_decode(source, name)):
            if index in wanted:
                yield f"{named}, frame {index}", frame.to_ndarray(format="rgb24")

    return len(chosen), frames()


def _decode(source: BytesSource, name: str) -> Iterator[tuple[float | None, Any]]:
    """(frames per second, frame) of the first video stream, in the order shown."""
    av = _decoder()
    with open_source(source, name) as file:
        try:
            yield from _decode_open(av, file)
        except (av.FFmpegError, ValueError) as error:
            raise UserError(
                f"{name} ({describe_source(source)}) is not a video that can be read: {error}"
            ) from error


def _decode_open(av: Any, file: BinaryIO) -> Iterator[tuple[float | None, Any]]:
    # A playlist may name other files and addresses; no protocol is allowed to open them.
    with av.open(file, options={"protocol_whitelist": "none"}) as container:
        if not container.streams.video:
            raise ValueError("it holds no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        rate = stream.average_rate or stream.guessed_rate
        for frame in container.decode(stream):
            yield float(rate) if rate else None, frame


def _decoder() -> Any:
    try:
        import av
    except ImportError as error:
        raise UserError(
            "reading video files needs PyAV: pip install 'k3jax[video]', or decode elsewhere and "
            "pass Video(frames=..., fps=...)"
        ) from error
    return av
