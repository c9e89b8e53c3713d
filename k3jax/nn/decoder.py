"""One decoder layer: attention and feed-forward on an ordinary or a block-residual stream."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax import ops
from k3jax.config import K3Config, LayerKind
from k3jax.nn.cache import CallContext
from k3jax.nn.feed_forward import GatedMLP
from k3jax.nn.kda import KimiDeltaAttention
from k3jax.nn.mla import LatentAttention
from k3jax.nn.moe import LatentMoE
from k3jax.nn.norm import DepthMix, RMSNorm


class Stream(NamedTuple):
    """The residual stream of attention residuals: what layers read and add to.

    Ordinary residual models use `prefix` alone and an empty bank.
    """

    prefix: jax.Array  # [B, T, D] running sum since the current block began
    bank: jax.Array  # [N, B, T, D] finished blocks, the embedding first; fixed size
    count: int | jax.Array  # bank entries that exist

    def push(self, starts: bool | jax.Array) -> "Stream":
        """Append `prefix` to the bank where a block starts."""
        if starts is False:
            return self
        if starts is True and isinstance(self.count, int):
            bank = self.bank.at[self.count].set(self.prefix)
            return self._replace(bank=bank, count=self.count + 1)
        starts = jnp.asarray(starts)
        bank = ops.push_block(self.bank, self.prefix, jnp.asarray(self.count), starts)
        return self._replace(bank=bank, count=self.count + starts.astype(jnp.int32))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward of one `LayerKind`."""

    def __init__(self, cfg: K3Config, kind: LayerKind, key: jax.Array):
        attention, feed_forward = jax.random.split(key)
        self.cfg = cfg
        self.kind = kind
        self.input_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.attention = (KimiDeltaAttention if kind.attention == "kda" else LatentAttention)(
            cfg, attention
        )
        self.post_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        if kind.feed_forward == "moe":
            self.feed_forward = LatentMoE(cfg, feed_forward)
        else:
            self.feed_forward = GatedMLP(cfg, cfg.ffn_dim, feed_forward)
        if cfg.attention_residual_block is not None:
            self.attention_mix = DepthMix(cfg.dim, cfg.norm_eps)
            self.feed_forward_mix = DepthMix(cfg.dim, cfg.norm_eps)

    def __call__(
        self,
        stream: Stream,
        cache,
        context: CallContext,
        *,
        starts_block: bool | jax.Array,
        most_blocks: int,
    ):
        """Advance the stream by one layer.

        Args:
            stream: the residual stream.
            cache: this layer's cache, or None.
            context: what the call shares.
            starts_block: whether an attention-residual block begins here; traced inside a scan
                whose repetitions differ.
            most_blocks: static bound on the bank entries that exist after this layer's push.

        Returns:
            stream, new cache, and a dictionary of what the context asked to collect.
        """
        mixes = self.cfg.attention_residual_block is not None
        collected = {}
        x = stream.prefix
        if mixes:
            x, probabilities, bank = self.attention_mix(
                stream.bank, stream.prefix, stream.count, most_blocks
            )
            stream = stream._replace(bank=bank)
            if context.trace:
                collected["attention_mix"] = in_source_order(probabilities, stream.count)
        attended, cache = self.attention(self.input_norm(x), cache, context)
        if mixes:
            stream = stream.push(starts_block)
            kept = 0 if starts_block is True else stream.prefix
            if not isinstance(starts_block, bool):
                kept = jnp.where(starts_block, jnp.zeros_like(stream.prefix), stream.prefix)
            stream = stream._replace(prefix=kept + attended)
            x, probabilities, bank = self.feed_forward_mix(
                stream.bank, stream.prefix, stream.count, most_blocks
            )
            stream = stream._replace(bank=bank)
            if context.trace:
                collected["feed_forward_mix"] = in_source_order(probabilities, stream.count)
        else:
            stream = stream._replace(prefix=stream.prefix + attended)
            x = stream.prefix
        x = self.post_norm(x)
        if self.kind.feed_forward == "moe":
            out, from_router = self.feed_forward(x, context)
            collected.update(from_router)
        else:
            out = self.feed_forward(x)
        stream = stream._replace(prefix=stream.prefix + out)
        if context.trace:
            collected["layer_output"] = stream.prefix
        return stream, cache, collected


def in_source_order(probabilities: jax.Array, count) -> jax.Array:
    """[B, T, N + 1] with `current` last -> the same with it after the existing entries."""
    banked, current = probabilities[..., :-1], probabilities[..., -1:]
    banked = jnp.pad(banked, ((0, 0), (0, 0), (0, 1)))
    return banked + current * (jnp.arange(banked.shape[-1]) == count)
