"""Prefill and single-token decoding with caches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from k3jax.errors import UserError
from k3jax.model import debug
from k3jax.model.caches import Caches, empty_caches
from k3jax.model.k3 import K3

# Room that `prefill` leaves for decoding when `max_length` is not given.
DEFAULT_ROOM = 256


def prefill(
    model: K3,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    caches: Caches | None = None,
    max_length: int | None = None,
    last_only: bool = False,
) -> tuple[jax.Array, Caches]:
    """Read a prompt, or the next piece of one, and remember it.

    Args:
        model: the model.
        tokens: [B, T] int32.
        segment_ids: [B, T] int32, 0 = padding; each row is one document. Left padding is the
            designed layout for rows of different lengths.
        caches: continue an earlier prefill (or decoding); None starts anew.
        max_length: columns of a new cache, padding included; default T + 256.
        last_only: logits of each row's last real token only.

    Returns:
        logits [B, T, W] float32 (or [B, W]), and the caches.

    Raises:
        UserError: ids out of range, a row with two segments, more tokens than the cache holds.
            Under jit, where values are unknown, these give NaN logits and unchanged caches
            (and `checkify` errors with `K3JAX_DEBUG=1`).
    """
    tokens = _as_tokens(tokens, 2)
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
        if segment_ids.shape != tokens.shape:
            raise UserError(
                f"segment_ids has shape {segment_ids.shape}, tokens {tokens.shape}; they must agree"
            )
    check_token_ids(tokens, model.cfg.vocab_size)
    _check_one_segment(segment_ids)
    if caches is None:
        if max_length is None:
            max_length = tokens.shape[1] + DEFAULT_ROOM
        if tokens.shape[1] > max_length:
            raise UserError(f"{tokens.shape[1]} tokens do not fit max_length={max_length}")
        dtype = model.language.embedding.dtype
        caches = empty_caches(model.cfg, tokens.shape[0], max_length, dtype)
    elif max_length is not None and max_length != caches.capacity:
        raise UserError(
            f"max_length={max_length} differs from the capacity {caches.capacity} of the caches "
            "given; a cache cannot grow, start a new one"
        )
    _check_room(caches, tokens)
    return _call(_prefill, model, tokens, segment_ids, caches, last_only=last_only)


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
    token = _as_tokens(token, 1)
    check_token_ids(token, model.cfg.vocab_size)
    _check_room(caches, token[:, None])
    return _call(_decode_step, model, token, caches)


def prefill_arrays(model: K3, tokens, segment_ids, caches: Caches, *, last_only: bool):
    """`prefill` on arrays, without value checks: for use inside other compiled programs."""
    hidden, caches, _, _, poison = model.run(tokens, segment_ids, caches)
    if last_only:
        last = jnp.full((tokens.shape[0],), tokens.shape[1] - 1)
        if segment_ids is not None:
            column = jnp.arange(tokens.shape[1])
            last = jnp.maximum(jnp.where(segment_ids > 0, column, -1).max(-1), 0)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        return model.logits(hidden, poison)[:, 0], caches
    return model.logits(hidden, poison), caches


def decode_arrays(model: K3, token: jax.Array, caches: Caches):
    """`decode_step` on arrays, without value checks."""
    hidden, caches, _, _, poison = model.run(token[:, None], None, caches, decode=True)
    return model.logits(hidden, poison)[:, 0], caches


_prefill = functools.partial(jax.jit, static_argnames=("last_only",))(prefill_arrays)
_decode_step = jax.jit(decode_arrays)


def _call(function, *args, **static):
    """Run a compiled function; with K3JAX_DEBUG=1 raise what its checks recorded."""
    if not debug.is_enabled() or any(_is_traced(leaf) for leaf in jax.tree.leaves(args)):
        return function(*args, **static)
    checked = checkify.checkify(lambda *a: function(*a, **static), errors=checkify.user_checks)
    error, result = checked(*args)
    error.throw()
    return result


def check_token_ids(tokens: jax.Array, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary where values are concrete."""
    if _is_traced(tokens) or tokens.size == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise UserError(f"token id {bad} lies outside 0..{vocab_size - 1}, the vocabulary")


def _check_one_segment(segment_ids) -> None:
    if segment_ids is None or _is_traced(segment_ids):
        return
    for row, ids in enumerate(np.asarray(segment_ids)):
        found = np.unique(ids[ids != 0])
        if found.size > 1 or (found < 0).any():
            raise UserError(
                f"row {row} holds segments {found.tolist()}; a row with a cache is one document "
                "(segment ids 0 for padding and one positive number)"
            )


def _check_room(caches: Caches, tokens: jax.Array) -> None:
    if _is_traced(caches.length):
        return
    used, capacity = int(caches.length), caches.capacity
    if used + tokens.shape[1] > capacity:
        raise UserError(
            f"{tokens.shape[1]} more tokens after {used} do not fit the cache of {capacity} "
            "columns; prefill with a larger max_length"
        )
    if tokens.shape[0] != caches.valid.shape[0]:
        raise UserError(f"{tokens.shape[0]} rows do not match the cache of {caches.valid.shape[0]}")


def _as_tokens(tokens, rank: int) -> jax.Array:
    tokens = jnp.asarray(tokens)
    if tokens.ndim != rank or not jnp.issubdtype(tokens.dtype, jnp.integer):
        wanted = "[B, T]" if rank == 2 else "[B]"
        raise UserError(f"tokens must be integers {wanted}, got {tokens.dtype} {tokens.shape}")
    return tokens.astype(jnp.int32)


def _is_traced(x) -> bool:
    return isinstance(x, jax.core.Tracer)
