"""Pictures and video as arrays: the container the model reads, and processing as released."""

from k3jax.media.container import Media

__all__ = ["Media"]
