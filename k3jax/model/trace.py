"""What happened inside a forward pass, layer by layer."""

import jax
import jax.numpy as jnp

from k3jax.model import debug
from k3jax.model.k3 import K3, stack_collected
from k3jax.nn.decoder import in_source_order


def trace(model: K3, tokens: jax.Array, segment_ids: jax.Array | None = None) -> dict:
    """Run a model and keep what a person would look at.

    Args:
        model: the model.
        tokens: [B, T] int32.
        segment_ids: [B, T] int32, 0 = padding; values at padding are unspecified.

    Returns:
        A dictionary:
        "logits" [B, T, W] float32;
        "layer_outputs" [L, B, T, D]: the running sum after each layer (the residual stream itself
        in models without attention residuals);
        "expert_ids" [M, B, T, R] int32 and "expert_weights" [M, B, T, R] float32 of the MoE
        layers, ascending by id (absent without experts);
        "attention_residual_weights" [X, B, T, N] float32: the mixtures in execution order, sources
        oldest block first and the running sum last, zero-padded to the N of the final mixture
        (absent in models without attention residuals).
    """
    return _trace(model, tokens, segment_ids)


def _trace_arrays(model, tokens, segment_ids):
    hidden, _, collected, mixture, _ = model.run(tokens, segment_ids, None, trace=True)
    result = {
        "logits": model.logits(hidden),
        "layer_outputs": stack_collected(collected, "layer_output"),
    }
    for key in ("expert_ids", "expert_weights"):
        found = stack_collected(collected, key)
        if found is not None:
            result[key] = found
    if mixture is not None:
        blocks = model.cfg.num_blocks
        attention = stack_collected(collected, "attention_mix")
        feed_forward = stack_collected(collected, "feed_forward_mix")
        pairs = jnp.stack([attention, feed_forward], axis=1).reshape(-1, *attention.shape[1:])
        last = in_source_order(mixture, blocks, blocks)
        # Layer 0 has no attention mixture: its only source is the embedding.
        result["attention_residual_weights"] = jnp.concatenate([pairs[1:], last[None]])
    return result


_trace = debug.compiled(_trace_arrays)
