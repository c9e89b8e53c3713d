"""Pictures and video as arrays: the container the model reads, and processing as released."""

from k3jax.media.buckets import bucket_media
from k3jax.media.config import MediaConfig, TransparentBackground
from k3jax.media.container import Media
from k3jax.media.grow import IGNORED, grow_placeholders
from k3jax.media.process import placeholder_text, process_media
from k3jax.media.video import Video

__all__ = [
    "IGNORED",
    "Media",
    "MediaConfig",
    "TransparentBackground",
    "Video",
    "bucket_media",
    "grow_placeholders",
    "placeholder_text",
    "process_media",
]
