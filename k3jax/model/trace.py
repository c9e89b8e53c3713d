"""What happened inside a forward pass, layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.media import Media
from k3jax.media.checks import is_known
from k3jax.model import debug
from k3jax.model.k3 import K3, stack_collected
from k3jax.model.media import enter_media
from k3jax.nn.decoder import in_source_order

# Traced array -> the axis that runs over patches or features.
_PATCH_AXES = {"patch_embed": 0, "vision_blocks": 1}
_FEATURE_AXES = {"vision_tower": 0, "projector": 0}


def trace(
    model: K3,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    media: Media | None = None,
) -> dict:
    """Run a model and keep what a person would look at.

    Args:
        model: the model.
        tokens: [B, T] int32.
        segment_ids: [B, T] int32, 0 = padding; values at padding are unspecified.
        media: see `K3.__call__`; T is the length of the grown rows.

    Returns:
        A dictionary:
        "logits" [B, T, W] float32;
        "layer_outputs" [L, B, T, D]: the running sum after each layer (the residual stream itself
        in models without attention residuals);
        "expert_ids" [M, B, T, R] int32 and "expert_weights" [M, B, T, R] float32 of the MoE
        layers, ascending by id (absent without experts);
        "attention_residual_weights" [X, B, T, N] float32: the mixtures in execution
        order (layer 0 has no attention mixture, the first is its feed-forward one), sources oldest
        block first and the running sum last, zero-padded to the N of the final mixture
        (absent in models without attention residuals).

        With media also, items back to back, P patches and F features of d and D channels:
        "patch_embed" [P, d] with its position and time embedding, "vision_blocks" [layers, P, d]
        after each block, "vision_tower" [F, 4, d] the merged rows after the final norm and the
        mean over frames, "projector" [F, D], "merged_embeddings" [B, T, D] what the first layer
        reads. Under `jax.jit` P and F are the static capacities of `media`, zeros at the end.
    """
    tokens, segment_ids = enter_media(model.cfg, tokens, segment_ids, media)
    result = _trace(model, tokens, segment_ids, media)
    if media is None or not is_known(media.grids):
        return result
    num_patches = int(np.asarray(media.grids, np.int64).prod(axis=1).sum())
    num_features = int(np.asarray(media.num_features).sum())
    for axes, count in ((_PATCH_AXES, num_patches), (_FEATURE_AXES, num_features)):
        for name, axis in axes.items():
            result[name] = jax.lax.slice_in_dim(result[name], 0, count, axis=axis)
    return result


def _trace_arrays(model, tokens, segment_ids, media):
    hidden, _, collected, mixture, poison, seen = model.run(
        tokens, segment_ids, None, media, trace=True
    )
    result = {
        "logits": model.logits(hidden, poison),
        "layer_outputs": stack_collected(collected, "layer_output"),
        **seen,
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
        last = in_source_order(mixture, blocks)
        # Layer 0 has no attention mixture: its only source is the embedding.
        result["attention_residual_weights"] = jnp.concatenate([pairs[1:], last[None]])
    return result


_trace = debug.compiled(_trace_arrays)
