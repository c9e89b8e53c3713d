"""Pictures and video as arrays: the container the model reads, and processing as released."""

from k3jax.media.buckets import bucket_media
from k3jax.media.container import Media
from k3jax.media.grow import IGNORED, grow_placeholders

__all__ = ["IGNORED", "Media", "bucket_media", "grow_placeholders"]
