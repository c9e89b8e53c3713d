"""Sampling text from a model."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import ops
from k3jax.errors import UserError
from k3jax.infer.cached import (
    as_one_segment,
    as_tokens,
    check_token_ids,
    decode_arrays,
    prefill,
)
from k3jax.media import Media
from k3jax.model import debug
from k3jax.model.k3 import K3
from k3jax.model.media import enter_media


def generate(
    model: K3,
    tokens: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    media: Media | None = None,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    key: jax.Array | None = None,
    stop_ids: Sequence[int] = (),
) -> jax.Array:
    """Continue prompts.

    Args:
        model: the model.
        tokens: prompts [B, T] int32, left-padded when lengths differ.
        segment_ids: [B, T] int32, 0 = padding.
        media: images and videos of the prompts' placeholders, see `K3.__call__`.
        max_new_tokens: tokens to add to each row.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_p: sample from the smallest set of tokens whose probabilities sum to at least this.
        key: random key; default `jax.random.key(0)`, so equal calls give equal text.
        stop_ids: a row ends after the first of these it samples.

    Returns:
        New tokens [B, max_new_tokens] int32; after a stop id a row holds the configuration's pad
        id (0 when it has none).

    Raises:
        UserError: an argument out of range, named, or logits that are not finite: weights that
            hold NaN, or (under jit, where it gives token 0) ids out of range.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if not temperature >= 0:
        raise UserError(f"temperature={temperature} must be 0 (greedy) or above")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p} must lie in (0, 1]")
    tokens = as_tokens(tokens, 2, model.cfg.vocab_size)
    segment_ids = as_one_segment(segment_ids, tokens)
    _check_prompts(segment_ids)
    tokens, segment_ids = enter_media(model.cfg, tokens, segment_ids, media, bucketed=True)
    stop = np.asarray(list(stop_ids), np.int64)
    check_token_ids(stop, model.cfg.vocab_size)
    key = jax.random.key(0) if key is None else key
    max_length = tokens.shape[1] + max_new_tokens
    logits, caches = prefill(
        model, tokens, segment_ids, media, max_length=max_length, last_only=True
    )
    if not isinstance(logits, jax.core.Tracer) and not bool(jnp.isfinite(logits).all()):
        raise UserError("the model's logits are not finite: its weights hold NaN or infinity")
    return _continue(
        model,
        logits,
        caches,
        key,
        jnp.float32(temperature),
        jnp.float32(top_p),
        jnp.asarray(stop, jnp.int32),
        max_new_tokens=max_new_tokens,
    )


def _check_prompts(segment_ids: jax.Array | None) -> None:
    if segment_ids is None or isinstance(segment_ids, jax.core.Tracer):
        return
    empty = np.flatnonzero(~np.asarray(segment_ids).any(axis=1))
    if empty.size:
        raise UserError(f"rows {empty.tolist()} of the prompts hold padding only")


def sample(logits: jax.Array, key: jax.Array, temperature, top_p) -> jax.Array:
    """One token per row of logits [B, W]; see `generate`."""
    greedy = jnp.argmax(logits, axis=-1)
    scaled = logits / jnp.maximum(temperature, 1e-6)
    order = jnp.argsort(-scaled, axis=-1)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    # Keep a token while the mass before it is below top_p; the best one always stays.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = jnp.where(before < top_p, ranked, -jnp.inf)
    choice = jax.random.categorical(key, kept, axis=-1)
    sampled = jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0]
    return jnp.where(temperature > 0, sampled, greedy).astype(jnp.int32)


def _continue_arrays(model, logits, caches, key, temperature, top_p, stop, *, max_new_tokens):
    pad = model.cfg.pad_id or 0
    column = jnp.arange(max_new_tokens, dtype=jnp.int32)
    # Sampling sorts the vocabulary: an all-gather over tensor, here and after each token.
    logits = ops.whole_over_tensor(logits)
    # Derived from the logits, so that rows lie on the devices of the prompts.
    done = jnp.zeros_like(logits[:, 0], jnp.bool_)
    out = jnp.where(done[:, None], 0, jnp.full_like(column, pad))

    def unfinished(state):
        step, _, _, _, done = state
        return (step < max_new_tokens) & ~done.all()

    def advance(state):
        step, logits, caches, out, done = state
        token = sample(logits, jax.random.fold_in(key, step), temperature, top_p)
        out = jnp.where(column == step, jnp.where(done, pad, token)[:, None], out)
        done = done | (token[:, None] == stop[None, :]).any(-1)
        # The last token needs no further logits, but a branch would cost more than it saves.
        logits, caches = decode_arrays(model, token, caches)
        return step + 1, ops.whole_over_tensor(logits), caches, out, done

    state = (jnp.int32(0), logits, caches, out, done)
    return jax.lax.while_loop(unfinished, advance, state)[3]


_continue = debug.compiled(_continue_arrays, static_argnames=("max_new_tokens",))
