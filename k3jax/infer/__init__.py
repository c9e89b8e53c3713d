"""Inference: prefill, decoding and sampling."""

from k3jax.infer.cached import decode_step, prefill
from k3jax.infer.generate import generate

__all__ = ["decode_step", "generate", "prefill"]
