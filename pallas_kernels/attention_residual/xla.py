"""The depth mixture in two passes over the rows, with a backward pass that stores only them.

Autodiff would keep the float32 rows, their normalised copies and the products. Here the bank and
the current sum, which exist anyway, and two numbers per row are kept.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.checks import align_varying


def attention_residual(
    bank: jax.Array, current: jax.Array, query: jax.Array, count: int | jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attention_residual`."""
    precise = jnp.promote_types(current.dtype, jnp.float32)
    query = query.astype(precise)
    num_entries = bank.shape[0]
    if isinstance(count, int):
        bank, count = bank[:count], None  # what does not exist is not even read
        bank, current, query = align_varying(bank, current, query)
    else:
        bank, current, query, count = align_varying(bank, current, query, count)
    mixed, probabilities = _mix(eps, bank, current, query, count)
    missing = num_entries - bank.shape[0]
    entries, last = probabilities[:-1], probabilities[-1:]
    absent = jnp.zeros_like(last, shape=(missing, *last.shape[1:]))
    return mixed, jnp.moveaxis(jnp.concatenate([entries, absent, last]), 0, -1)


def _existing(bank: jax.Array, count: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Return the bank [N, B, T, D] with 0 in the entries that do not exist, which may be NaN."""
    bank = bank.astype(dtype)
    if count is None:
        return bank
    exists = jnp.arange(bank.shape[0]) < count
    return jnp.where(exists[:, None, None, None], bank, 0)


def _sums(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.sum(rows * weight, axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(eps, bank, current, query, count):
    return _mix_forward(eps, bank, current, query, count)[0]


def _mix_forward(eps, bank, current, query, count):
    rows = _existing(bank, count, query.dtype)
    now = current.astype(query.dtype)
    squares = jnp.concatenate([_sums(rows, rows), _sums(now, now)[None]])
    products = jnp.concatenate([_sums(rows, query), _sums(now, query)[None]])  # [N+1, B, T]
    inverse_norm = jax.lax.rsqrt(squares / current.shape[-1] + eps)
    scores = products * inverse_norm
    if count is not None:
        exists = jnp.append(jnp.arange(bank.shape[0]) < count, True)
        scores = jnp.where(exists[:, None, None], scores, -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=0)
    mixed = (
        jnp.sum(probabilities[:-1, ..., None] * rows, axis=0) + probabilities[-1, ..., None] * now
    )
    kept = (bank, current, query, count, inverse_norm, products, probabilities)
    return (mixed.astype(current.dtype), probabilities), kept


def _mix_backward(eps, kept, cotangents):
    del eps
    bank, current, query, count, inverse_norm, products, probabilities = kept
    d_mixed, d_probabilities = cotangents
    d_mixed = d_mixed.astype(query.dtype)
    rows = _existing(bank, count, query.dtype)
    now = current.astype(query.dtype)
    along = jnp.concatenate([_sums(rows, d_mixed), _sums(now, d_mixed)[None]])  # [N+1, B, T]
    along = probabilities * (along + d_probabilities)
    d_scores = along - probabilities * jnp.sum(along, axis=0)
    # score = (row . query) * inverse_norm; inverse_norm depends on the row, too.
    d_product = d_scores * inverse_norm
    d_square = -d_scores * products * inverse_norm**3 / current.shape[-1]

    def d_row(row, p, product, square):
        return p[..., None] * d_mixed + product[..., None] * query + square[..., None] * row

    d_bank = d_row(rows, probabilities[:-1], d_product[:-1], d_square[:-1])
    d_current = d_row(now, probabilities[-1], d_product[-1], d_square[-1])
    d_query = jnp.einsum("nbt,nbtd->d", d_product[:-1], rows)
    d_query += jnp.einsum("bt,btd->d", d_product[-1], now)
    return d_bank.astype(bank.dtype), d_current.astype(current.dtype), d_query, None


_mix.defvjp(_mix_forward, _mix_backward)
