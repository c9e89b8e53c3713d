"""The training loss."""

import jax
import jax.numpy as jnp

from k3jax.model.k3 import K3
from k3jax.model.stack import Remat


def target_mask(tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """[B, T-1] bool: position t predicts token t+1 of the same non-zero segment."""
    if segment_ids is None:
        return jnp.ones((tokens.shape[0], tokens.shape[1] - 1), jnp.bool_)
    return (segment_ids[:, :-1] == segment_ids[:, 1:]) & (segment_ids[:, 1:] != 0)


def next_token_loss(
    model: K3,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    remat: Remat = "none",
) -> tuple[jax.Array, dict]:
    """Mean cross entropy, in nats, of each token given those before it in its segment.

    Args:
        model: the model; `jax.grad` over it (or its `nnx.Param` part) works.
        tokens: [B, T] int32.
        segment_ids: [B, T] int32, 0 = padding.
        remat: see `K3.forward`.

    Returns:
        loss [] float32 (0 when there is no target), and metrics: "loss", "num_targets" [] int32,
        "token_losses" [B, T-1] float32 (0 where there is no target), "statistics"
        (`RouterStatistics` for `balance_routers`, or None).
    """
    logits, _, statistics = model.forward(tokens, segment_ids, statistics=True, remat=remat)
    mask = target_mask(tokens, segment_ids)
    with jax.named_scope("cross_entropy"):
        logits = logits[:, :-1]
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        losses = jnp.where(mask, losses, 0.0)
        num_targets = mask.sum(dtype=jnp.int32)
        loss = losses.sum() / jnp.maximum(num_targets, 1)
    metrics = {
        "loss": loss,
        "num_targets": num_targets,
        "token_losses": losses,
        "statistics": statistics,
    }
    return loss, metrics
