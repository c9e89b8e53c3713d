"""The training loss."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import ops
from k3jax.errors import UserError
from k3jax.media import Media
from k3jax.model import debug
from k3jax.model.k3 import K3, check_shapes
from k3jax.model.media import enter_media
from k3jax.model.spread import spread_rows
from k3jax.model.stack import Remat


def target_mask(
    tokens: jax.Array, segment_ids: jax.Array | None, placeholder_id: int | None = None
) -> jax.Array:
    """[B, T-1] bool: position t predicts token t+1 of the same non-zero segment.

    With `placeholder_id`, tokens that stand for features of an image are no targets.
    """
    if segment_ids is None:
        mask = jnp.ones((tokens.shape[0], tokens.shape[1] - 1), jnp.bool_)
    else:
        mask = (segment_ids[:, :-1] == segment_ids[:, 1:]) & (segment_ids[:, 1:] != 0)
    return mask if placeholder_id is None else mask & (tokens[:, 1:] != placeholder_id)


def token_losses(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """-log p(token t+1) in nats under logits [B, T, W] at t: [B, T-1] float32."""
    chosen = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits[:, :-1], axis=-1) - chosen


def next_token_loss(
    model: K3,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    media: Media | None = None,
    *,
    targets: jax.Array | None = None,
    remat: Remat = "none",
    auxiliary: bool = False,
    parallel: ops.Parallel = ops.DEFAULT_PARALLEL,
) -> tuple[jax.Array, dict]:
    """Mean cross entropy, in nats, of each token given those before it in its segment.

    Args:
        model: the model; `jax.grad` over it (or its `nnx.Param` part, where experts are packed)
            works.
        tokens: [B, T] int32.
        segment_ids: [B, T] int32, 0 = padding.
        media: see `K3.__call__`; the positions of its features are no targets.
        targets: [B, T] bool, the tokens to predict (those of `chat.encode(...).targets`, say);
            with media of the grown tokens. None: all of them.
        remat: see `K3.forward`.
        auxiliary: the statistics hold what `auxiliary_loss` needs, with its gradient.
        parallel: see `K3.forward`.

    Returns:
        loss [] float32 (0 when there is no target), and metrics: "loss", "num_targets" [] int32,
        "token_losses" [B, T-1] float32 (0 where there is no target; T after growth), "statistics"
        (`RouterStatistics` for `balance_routers`, or None).
    """
    check_shapes(tokens, segment_ids)
    tokens, segment_ids = enter_media(model.cfg, tokens, segment_ids, media)
    if targets is not None and np.shape(targets) != np.shape(tokens):
        raise UserError(
            f"targets {np.shape(targets)} must have the shape of tokens {np.shape(tokens)}; with "
            "media, grow both first (k3jax.media.grow_placeholders)"
        )
    options = {"remat": remat, "auxiliary": auxiliary, "parallel": parallel}
    return _loss(model, tokens, segment_ids, media, targets, **options)


def _loss_arrays(model, tokens, segment_ids, media, targets, **options):
    rows = spread_rows(
        tokens, segment_ids, parallel=options["parallel"], pad_id=model.cfg.pad_id or 0
    )
    found = model.run(rows.tokens, rows.segment_ids, None, media, statistics=True, **options)
    statistics = model.router_statistics(found.collected, tokens, segment_ids)
    # The next token may lie on another device: these few bytes are whole rows everywhere.
    tokens = ops.whole_tokens(rows.tokens)
    if rows.segment_ids is not None:
        segment_ids = ops.whole_tokens(rows.segment_ids)
    ignored = None if media is None else model.cfg.media_placeholder_id
    mask = target_mask(tokens, segment_ids, ignored)
    if targets is not None:
        mask &= rows.alike(targets)[:, 1:] != 0
    # An id that does not exist must not pass for one that is no target.
    next_tokens = jnp.where(tokens[:, 1:] < 0, model.cfg.vocab_size, tokens[:, 1:])
    next_tokens = jnp.pad(jnp.where(mask, next_tokens, -1), ((0, 0), (0, 1)), constant_values=-1)
    losses = ops.whole_tokens(model.losses(found.hidden, next_tokens, found.poison))
    losses = losses[:, : rows.length - 1]
    num_targets = mask.sum(dtype=jnp.int32)
    loss = losses.sum() / jnp.maximum(num_targets, 1)
    metrics = {
        "loss": loss,
        "num_targets": num_targets,
        "token_losses": losses,
        "statistics": statistics,
    }
    return loss, metrics


_loss = debug.compiled(_loss_arrays, static_argnames=("remat", "auxiliary", "parallel"))
