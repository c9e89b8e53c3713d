"""Prefill and single-token decoding with caches."""

import jax
import jax.numpy as jnp
import numpy as np

import meshes
from k3jax import ops
from k3jax.errors import UserError
from k3jax.media import Media
from k3jax.model import debug
from k3jax.model.caches import Caches, empty_caches
from k3jax.model.k3 import K3
from k3jax.model.media import enter_media

# Room that `prefill` leaves for decoding when `max_length` is not given.
DEFAULT_ROOM = 256


def prefill(
    model: K3,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    media: Media | None = None,
    *,
    caches: Caches | None = None,
    max_length: int | None = None,
    last_only: bool = False,
) -> tuple[jax.Array, Caches]:
    """Read a prompt, or the next piece of one, and remember it.

    Args:
        model: the model.
        tokens: [B, T] int32.
        segment_ids: [B, T] int32, 0 = padding; each row is one document, whose pieces may carry
            different ids. Left padding is the designed layout for rows of different lengths.
        media: images and videos of the placeholders in these tokens, see `K3.__call__`; T is the
            length of the grown rows.
        caches: continue an earlier prefill (or decoding); None starts anew.
        max_length: columns of a new cache, padding included; default T + 256.
        last_only: logits of each row's last real token only.

    Returns:
        logits [B, T, W] float32 (or [B, W]), and the caches.

    Raises:
        UserError: ids out of range, a row with two segments, more tokens than the cache holds,
            media that does not fit the placeholders or the model. Under jit, where values are
            unknown, these give NaN logits and, for the first three, unchanged caches
            (and `checkify` errors with `K3JAX_DEBUG=1`).
    """
    tokens = as_tokens(tokens, 2, model.cfg.vocab_size)
    segment_ids = as_one_segment(segment_ids, tokens)
    tokens, segment_ids = enter_media(model.cfg, tokens, segment_ids, media)
    tokens = jnp.asarray(tokens)
    batch, num_tokens = tokens.shape
    if caches is None:
        if max_length is None:
            max_length = num_tokens + DEFAULT_ROOM
        if num_tokens > max_length:
            raise UserError(f"{num_tokens} tokens do not fit max_length={max_length}")
        dtype = model.language.embedding.dtype
        rows = meshes.spec_of(tokens)[0]
        caches = empty_caches(model.cfg, batch, max_length, dtype, rows=rows)
    elif max_length is not None and max_length != caches.capacity:
        raise UserError(
            f"max_length={max_length} differs from the capacity {caches.capacity} of the caches "
            "given; a cache cannot grow, start a new one"
        )
    _check_room(caches, tokens)
    return _prefill(model, tokens, segment_ids, caches, media, last_only=last_only)


def decode_step(model: K3, token: jax.Array, caches: Caches) -> tuple[jax.Array, Caches]:
    """One more token per row; MLA runs in its absorbed latent form.

    Args:
        model: the model.
        token: [B] int32, all real.
        caches: from `prefill` or an earlier step.

    Returns:
        logits [B, W] float32 and the caches.

    Raises:
        UserError: as `prefill`.
    """
    token = jnp.asarray(as_tokens(token, 1, model.cfg.vocab_size))
    _check_room(caches, token[:, None])
    return _decode_step(model, token, caches)


def prefill_arrays(
    model: K3, tokens, segment_ids, caches: Caches, media: Media | None = None, *, last_only: bool
):
    """`prefill` on arrays, without value checks: for use inside other compiled programs."""
    found = model.run(tokens, segment_ids, caches, media)
    hidden, caches, poison = found.hidden, found.caches, found.poison
    if last_only:
        column = jnp.arange(tokens.shape[1])
        is_last = column == tokens.shape[1] - 1
        if segment_ids is not None:
            last = jnp.where(ops.whole_tokens(segment_ids) != 0, column, -1).max(-1, keepdims=True)
            is_last = column == jnp.maximum(last, 0)
        # A sum, because tokens may be cut over devices.
        is_last = jnp.broadcast_to(is_last, tokens.shape)[..., None]
        hidden = jnp.where(is_last, hidden, 0).sum(1, keepdims=True)
        return model.logits(hidden, poison)[:, 0], caches
    return model.logits(hidden, poison), caches


def decode_arrays(model: K3, token: jax.Array, caches: Caches):
    """`decode_step` on arrays, without value checks."""
    found = model.run(token[:, None], None, caches, decode=True)
    return model.logits(found.hidden, found.poison)[:, 0], found.caches


_prefill = debug.compiled(prefill_arrays, static_argnames=("last_only",))
_decode_step = debug.compiled(decode_arrays)


def as_tokens(tokens, rank: int, vocab_size: int) -> jax.Array | np.ndarray:
    """Tokens as int32, refused where they are not integers of this rank or a value is no id.

    Host values stay on the host, so that they remain known while a caller is being traced.
    """
    tokens = _as_array(tokens)
    if tokens.ndim != rank or not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.size == 0:
        wanted = "[B, T]" if rank == 2 else "[B]"
        raise UserError(
            f"tokens must be integers {wanted}, at least one, got {tokens.dtype} {tokens.shape}"
        )
    # Before the cast to int32, which could wrap a wrong id to a right one.
    check_token_ids(tokens, vocab_size)
    return tokens if tokens.dtype == jnp.int32 else tokens.astype(jnp.int32)


def check_token_ids(tokens: jax.Array | np.ndarray, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary where values are concrete."""
    if _is_traced(tokens) or tokens.size == 0:
        return
    # In numpy: constants of a function that is being traced have values, jnp results do not.
    values = np.asarray(tokens)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise UserError(f"token id {bad} lies outside 0..{vocab_size - 1}, the vocabulary")


def as_one_segment(segment_ids, tokens: jax.Array | np.ndarray) -> jax.Array | np.ndarray | None:
    """Segment ids as int32, refused where a row holds two segments or the shape is another."""
    if segment_ids is None:
        return None
    segment_ids = _as_array(segment_ids)
    is_integer = jnp.issubdtype(segment_ids.dtype, jnp.integer) or segment_ids.dtype == jnp.bool_
    if segment_ids.shape != tokens.shape or not is_integer:
        raise UserError(
            f"segment_ids is {segment_ids.dtype} {segment_ids.shape}; it must be integers of the "
            f"shape of tokens, {tokens.shape}"
        )
    if not _is_traced(segment_ids):
        for row, ids in enumerate(np.asarray(segment_ids)):
            found = np.unique(ids[ids != 0])
            if found.size > 1:
                raise UserError(
                    f"row {row} holds segments {found.tolist()}; a row with a cache is one "
                    "document (segment ids 0 for padding and one other number)"
                )
    return segment_ids if segment_ids.dtype == jnp.int32 else segment_ids.astype(jnp.int32)


def _check_room(caches: Caches, tokens: jax.Array) -> None:
    if tokens.shape[0] != caches.valid.shape[0]:
        raise UserError(f"{tokens.shape[0]} rows do not match the cache of {caches.valid.shape[0]}")
    if _is_traced(caches.length):
        return
    used, capacity = int(caches.length), caches.capacity
    if used + tokens.shape[1] > capacity:
        raise UserError(
            f"{tokens.shape[1]} more tokens after {used} do not fit the cache of {capacity} "
            "columns; prefill with a larger max_length"
        )


def _as_array(values) -> jax.Array | np.ndarray:
    return values if isinstance(values, jax.Array) else np.asarray(values)


def _is_traced(x) -> bool:
    return isinstance(x, jax.core.Tracer)
