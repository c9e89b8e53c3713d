"""The depth mixture in two passes over the rows, with a backward pass that stores only them.

Autodiff would keep the float32 rows, their normalised copies and the products. Here the bank and
the current sum, which exist anyway, and three numbers per row are kept.

Tokens are one flat dimension inside: XLA on CPU takes 50 times longer for a sum of products over
the last dimension when a leading dimension has size 1.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import align_varying
from pallas_kernels.device import current_device

# Float32 scores: accelerators must not fall back to a shorter product.
_precise = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _in_thirds(x: jax.Array) -> jax.Array:
    """Split float32 numbers into three of 8 significant bits each, along a new last axis."""
    parts = []
    for _ in range(3):
        parts.append(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = x - parts[-1]
    return jnp.stack(parts, axis=-1)


def _is_short(rows: jax.Array) -> bool:
    """Whether rows [.., D] are bfloat16 and the device multiplies such numbers faster."""
    return rows.dtype == jnp.bfloat16 and current_device().platform != "cpu"


def _project(rows: jax.Array, query: jax.Array) -> jax.Array:
    """Products of rows [.., D] with a float32 query [D], as exact as float32."""
    if not _is_short(rows):
        return _precise(rows.astype(query.dtype), query)
    # The thirds are bfloat16 numbers, too: one short product with three columns loses nothing.
    thirds = _in_thirds(query).astype(rows.dtype)
    return jnp.sum(jnp.matmul(rows, thirds, preferred_element_type=query.dtype), axis=-1)


def _combine(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """Sum of rows [R, D] times float32 weights [R], as exact as float32."""
    if not _is_short(rows):
        return _precise(weights, rows.astype(weights.dtype))
    thirds = _in_thirds(weights).astype(rows.dtype).T
    return jnp.sum(jnp.matmul(thirds, rows, preferred_element_type=weights.dtype), axis=0)


def attention_residual(
    bank: jax.Array,
    current: jax.Array,
    query: jax.Array,
    count: int | jax.Array,
    most: int,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.attention_residual`."""
    num_entries, num_rows, width = bank.shape[0], math.prod(current.shape[:-1]), current.shape[-1]
    query = query.astype(jnp.promote_types(current.dtype, jnp.float32))
    # What cannot exist is not even read.
    bank = bank[: count if isinstance(count, int) else most]
    if bank.shape[0] == 0:
        one = jnp.ones_like(current[..., :1], dtype=query.dtype)
        return current, jnp.pad(one, ((0, 0), (0, 0), (num_entries, 0)))
    bank = bank.reshape(bank.shape[0], num_rows, width)
    flat, count = current.reshape(num_rows, width), jnp.asarray(count, jnp.int32)
    bank, flat, query, count = align_varying(bank, flat, query, count)
    mixed, probabilities = _mix(eps, bank, flat, query, count)
    absent = jnp.zeros_like(probabilities, shape=(num_entries - bank.shape[0], num_rows))
    probabilities = jnp.concatenate([probabilities[:-1], absent, probabilities[-1:]])
    return (
        mixed.reshape(current.shape),
        jnp.moveaxis(probabilities, 0, -1).reshape(*current.shape[:-1], num_entries + 1),
    )


def _stack(of_entries: jax.Array, of_current: jax.Array, count: jax.Array) -> jax.Array:
    """Join numbers per row [N, R] and [R]; 0 in the entries that do not exist, which may be NaN."""
    exists = jnp.arange(of_entries.shape[0]) < count
    # As parts of the fusion that joins them, the sums would not be vectorised.
    of_entries, of_current = lax.optimization_barrier((of_entries, of_current))
    return jnp.concatenate([jnp.where(exists[:, None], of_entries, 0), of_current[None]])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(eps, bank, current, query, count):
    return _mix_forward(eps, bank, current, query, count)[0]


def _mix_forward(eps, bank, current, query, count):
    rows, now = bank.astype(query.dtype), current.astype(query.dtype)  # [N, R, D], [R, D]
    num_entries, _, width = rows.shape
    squares = jnp.sum((rows * rows).reshape(-1, width), axis=-1).reshape(rows.shape[:2])
    squares = _stack(squares, jnp.sum(now * now, axis=-1), count)
    products = _stack(_project(bank, query), _project(current, query), count)  # [N+1, R]
    inverse_norm = lax.rsqrt(squares / width + eps)
    exists = jnp.append(jnp.arange(num_entries) < count, True)
    scores = jnp.where(exists[:, None], products * inverse_norm, -jnp.inf)
    probabilities = lax.optimization_barrier(jax.nn.softmax(scores, axis=0))
    mixed = probabilities[-1, :, None] * now
    for n in range(num_entries):  # one fused pass; a reduction over axis 0 is strided
        mixed += jnp.where(n < count, probabilities[n, :, None] * rows[n], 0)
    kept = (bank, current, query, count, inverse_norm, products, probabilities)
    return (mixed.astype(current.dtype), probabilities), kept


def _mix_backward(eps, kept, cotangents):
    del eps
    bank, current, query, count, inverse_norm, products, probabilities = kept
    d_mixed, d_probabilities = cotangents
    d_mixed, now = d_mixed.astype(query.dtype), current.astype(query.dtype)

    def stored_row(n):
        return lax.dynamic_index_in_dim(bank, n, keepdims=False)

    def row(n):
        return stored_row(n).astype(query.dtype)

    def project(n, along):
        return lax.dynamic_update_index_in_dim(along, jnp.sum(row(n) * d_mixed, axis=-1), n, 0)

    along = lax.fori_loop(0, count, project, jnp.zeros_like(probabilities[:-1]))
    along = _stack(along, jnp.sum(now * d_mixed, axis=-1), count)
    along = probabilities * (along + d_probabilities)
    d_scores = along - probabilities * jnp.sum(along, axis=0)
    # score = (row . query) * inverse_norm; inverse_norm depends on the row, too.
    d_products = d_scores * inverse_norm
    d_squares = -d_scores * products * inverse_norm**3 / current.shape[-1]
    d_products, d_squares = lax.optimization_barrier((d_products, d_squares))

    def d_rows(rows, index):
        columns = (probabilities, d_products, d_squares)
        probability, product, square = (column[index][..., None] for column in columns)
        return probability * d_mixed + product * query + square * rows

    exists = (jnp.arange(bank.shape[0]) < count)[:, None, None]
    d_bank = jnp.where(exists, d_rows(bank.astype(query.dtype), slice(-1)), 0)
    d_query = lax.fori_loop(
        0,
        count,
        lambda n, total: total + _combine(d_products[n], stored_row(n)),
        _combine(d_products[-1], current),
    )
    d_current = d_rows(now, -1)
    return d_bank.astype(bank.dtype), d_current.astype(current.dtype), d_query, None


_mix.defvjp(_mix_forward, _mix_backward)


# --- two phases ----------------------------------------------------------------------------------


def attention_residual_block(
    bank: jax.Array, queries: jax.Array, count: int | jax.Array, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.attention_residual_block`."""
    precise = jnp.promote_types(bank.dtype, jnp.float32)
    queries = queries.astype(precise)
    if isinstance(count, int):
        bank = bank[:count]
    exists = jnp.arange(bank.shape[0]) < count
    rows = jnp.where(exists[:, None, None, None], bank.astype(precise), 0)  # [N, B, T, D]
    inverse_norm = lax.rsqrt(jnp.mean(rows * rows, axis=-1) + eps)
    stored = jnp.where(exists[:, None, None, None], bank, 0)
    products = jnp.stack([_project(stored, query) for query in queries])  # [Q, N, B, T]
    scores = jnp.where(exists[:, None, None], products * inverse_norm, -jnp.inf)
    maximum = lax.stop_gradient(jnp.max(scores, axis=1, initial=-jnp.inf))
    weights = jnp.exp(scores - jnp.where(maximum == -jnp.inf, 0, maximum)[:, None])
    weighted = jnp.zeros((*maximum.shape, bank.shape[-1]), precise)
    for n in range(bank.shape[0]):
        weighted += weights[:, n, :, :, None] * rows[n]
    return weighted, maximum, jnp.sum(weights, axis=1)


def attention_residual_merge(
    weighted: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    current: jax.Array,
    query: jax.Array,
    eps: float,
) -> jax.Array:
    """See `pallas_kernels.attention_residual_merge`, of one query's part of the bank."""
    values, query = current.astype(weighted.dtype), query.astype(weighted.dtype)
    inverse_norm = lax.rsqrt(jnp.mean(values * values, axis=-1) + eps)
    score = _project(current, query) * inverse_norm
    maximum = lax.stop_gradient(maximum)
    new_maximum = lax.stop_gradient(jnp.maximum(maximum, score))
    shrink, weight = jnp.exp(maximum - new_maximum), jnp.exp(score - new_maximum)
    inverse_total = 1 / (total * shrink + weight)
    mixed = weighted * (shrink * inverse_total)[..., None]
    return (mixed + values * (weight * inverse_total)[..., None]).astype(current.dtype)
