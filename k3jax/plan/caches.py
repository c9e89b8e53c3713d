"""Bytes that one sequence holds while it is decoded."""

import dataclasses

from k3jax.config import K3Config

# Storage types of activations (conv tails, latents); the KDA state is always float32.
BYTES_PER_VALUE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheBytes:
    """State and cache of one sequence after `length` tokens.

    Attributes:
        length: tokens held.
        dtype: storage type of `conv_tails` and `latents`.
        kda_state: [H, K, V] float32 per KDA layer, whatever the length.
        conv_tails: the last W - 1 inputs of the three convolutions per KDA layer.
        latents_per_token: normalised c_kv and the shared key channels, per MLA layer, of a token.
    """

    length: int
    dtype: str
    kda_state: int
    conv_tails: int
    latents_per_token: int

    @property
    def latents(self) -> int:
        """The part that grows with the sequence."""
        return self.latents_per_token * self.length

    @property
    def total(self) -> int:
        """Everything the sequence holds."""
        return self.kda_state + self.conv_tails + self.latents

    @property
    def per_token(self) -> float:
        """`total` spread over the tokens."""
        return self.total / self.length


def count_cache_bytes(cfg: K3Config, *, length: int, dtype: str = "bfloat16") -> CacheBytes:
    """Bytes of KDA state, convolution tails and MLA latents of one sequence.

    Args:
        cfg: the model.
        length: tokens of the sequence.
        dtype: storage type of tails and latents, a key of `BYTES_PER_VALUE`.

    Raises:
        ValueError: `length` is not positive or `dtype` is unknown.
    """
    if length <= 0:
        raise ValueError(f"length={length} must be positive")
    if dtype not in BYTES_PER_VALUE:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(BYTES_PER_VALUE)}")
    size = BYTES_PER_VALUE[dtype]
    kda, mla = cfg.kda, cfg.mla
    inner = kda.num_heads * kda.head_dim
    latent_dim = mla.kv_lora_rank + mla.qk_rope_head_dim
    return CacheBytes(
        length=length,
        dtype=dtype,
        kda_state=len(cfg.kda_layers) * inner * kda.head_dim * 4,
        conv_tails=len(cfg.kda_layers) * (kda.conv_size - 1) * 3 * inner * size,
        latents_per_token=len(cfg.full_attention_layers) * latent_dim * size,
    )
