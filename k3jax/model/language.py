"""The text model: embedding, decoder stack, final depth mixture, norm and output head."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax import ops
from k3jax.config import K3Config
from k3jax.model.stack import LayerStack
from k3jax.nn.cache import CallContext
from k3jax.nn.initializers import Normal
from k3jax.nn.norm import DepthMix, RMSNorm
from k3jax.nn.parameters import weight


class LanguageModel(nnx.Module):
    """tokens -> hidden states -> logits."""

    def __init__(self, cfg: K3Config, key: jax.Array):
        embedding, stack, head = jax.random.split(key, 3)
        normal = Normal(cfg.initializer_range)
        self.cfg = cfg
        self.embedding = weight(embedding, (cfg.vocab_size, cfg.dim), ("vocab", "embed"), normal)
        self.stack = LayerStack(cfg, stack)
        if cfg.attention_residual_block is not None:
            self.output_mix = DepthMix(cfg.dim, cfg.norm_eps)
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.head = weight(head, (cfg.dim, cfg.vocab_size), ("embed", "vocab"), normal)

    def embed(self, tokens: jax.Array) -> jax.Array:  # [B, T] -> [B, T, D]
        with jax.named_scope("embedding"):
            return ops.embed(self.embedding[...], tokens)

    def hidden(self, x: jax.Array, caches, context: CallContext, *, remat, scan):
        """Embeddings [B, T, D] -> final normed hidden state, new caches, collected arrays."""
        stream, caches, collected = self.stack(x, caches, context, remat=remat, scan=scan)
        x = stream.prefix
        mixture = None
        if self.cfg.attention_residual_block is not None:
            x, mixture, _ = self.output_mix(stream.bank, stream.prefix, stream.count)
        return self.norm(x), caches, collected, mixture

    def logits(self, hidden: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, W] float32
        with jax.named_scope("head"):
            return ops.dense("btd,dw->btw", hidden, self.head[...], dtype=jnp.float32)

    def losses(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """-log p(targets [B, T]) under hidden [B, T, D], 0 where negative; [B, T] float32.

        The logits that `logits` would give are never in memory at once.
        """
        with jax.named_scope("head"):
            return ops.cross_entropy(hidden, self.head[...], targets)
