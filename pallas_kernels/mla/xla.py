"""Flash attention in jax.numpy: tiles of queries times tiles of keys, with dynamic loop bounds.

No [T, S] array is ever stored. For each tile of queries the keys are visited from the first tile
that any of its segments reaches to the last one that causality admits, so packed rows cost what
their documents cost. Output and log-sum-exp are kept for the backward pass, which forms each
tile of probabilities again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import align_varying
from pallas_kernels.mla.options import AttentionOptions, id_ranges, query_limits

# Operands are float32 here, also of bfloat16 calls: products of rounded weights stray further from
# float32 than the released bfloat16 model does. Accelerators must not shorten the product either.
_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class AttentionTiles:
    """Tokens of one tile."""

    queries: int
    keys: int


# Most keys -> tiles. Small tiles skip more of the masked half, large ones multiply faster.
TILES = {1024: AttentionTiles(queries=128, keys=128), None: AttentionTiles(queries=256, keys=256)}


def _tiles_for(num_keys: int) -> AttentionTiles:
    return next(tiles for most, tiles in TILES.items() if most is None or num_keys <= most)


def mla_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: AttentionOptions,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    q_offset: int | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.mla_attention`."""
    if q.shape[0] == 0:  # no rows to make tiles of
        output = jnp.zeros((*q.shape[:3], v.shape[-1]), options.output_dtype)
        return output, jnp.zeros((0, q.shape[2]), jnp.float32)
    operands = _operands(q, k, v, options, segment_ids, kv_segment_ids, q_offset)
    return _attention(options, *operands)


def _operands(q, k, v, options, segment_ids, kv_segment_ids, q_offset):
    q_limits = query_limits(q_offset, *q.shape[:2], k.shape[1], options.causal)
    if segment_ids is None:
        q, k, v, q_limits = align_varying(q, k, v, q_limits)
        return q, k, v, None, q_limits
    q, k, v, q_limits, *ids = align_varying(q, k, v, q_limits, segment_ids, kv_segment_ids)
    return q, k, v, ids, q_limits


def part(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: AttentionOptions,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    q_offset: int | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.mla.parts`."""
    operands = _operands(q, k, v, options, segment_ids, kv_segment_ids, q_offset)
    (output, _), (*_, log_sum) = _attention_forward(options, *operands)
    return output, log_sum


def part_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: AttentionOptions,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    q_offset: int | jax.Array,
    output: jax.Array,
    log_sum: jax.Array,
    d_output: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.mla.parts`."""
    operands = _operands(q, k, v, options, segment_ids, kv_segment_ids, q_offset)
    return _attention_backward(options, (*operands, output, log_sum), (d_output, None))[:3]


@dataclasses.dataclass(frozen=True)
class _Tiled:
    """Operands as [B, H, tokens, width], padded to tiles.

    What no query may see is zero, so that a product with probability 0 is 0.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_ids: jax.Array | None  # [B, T], 0 is padding
    k_ids: jax.Array | None  # [B, S]
    q_limits: jax.Array  # last key position that the query may see [B, T]
    num_q: int  # tokens of a tile
    num_k: int
    first_tile: jax.Array  # of keys, for each tile of queries
    last_tile: jax.Array  # one past


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, padding)


def _tiled(q, k, v, ids, q_limits) -> _Tiled:
    precise = jnp.promote_types(q.dtype, jnp.float32)
    tiles = _tiles_for(k.shape[1])
    num_q, num_k = min(tiles.queries, q.shape[1]), min(tiles.keys, k.shape[1])
    q_ids, k_ids = (None, None) if ids is None else ids
    q_is_real = jnp.ones_like(q_limits, dtype=bool) if ids is None else q_ids != 0
    k_is_real = jnp.arange(k.shape[1]) <= q_limits[:, -1:]
    if ids is not None:
        k_is_real &= k_ids != 0

    def heads_first(x, is_real, tokens):
        x = jnp.where(is_real[:, :, None, None], x, 0).astype(precise)
        return _pad(jnp.swapaxes(x, 1, 2), 2, tokens)

    q = heads_first(q, q_is_real, num_q)
    k, v = heads_first(k, k_is_real, num_k), heads_first(v, k_is_real, num_k)
    if ids is not None:
        q_ids, k_ids = _pad(q_ids, 1, num_q), _pad(k_ids, 1, num_k)
    q_limits = _pad(q_limits, 1, num_q)

    # Which tiles meet at all [B, tiles of T, tiles of S]; only the bounds must be exact.
    tile_limits = jnp.max(q_limits.reshape(q.shape[0], -1, num_q), axis=2)
    meet = jnp.arange(0, k.shape[2], num_k) <= tile_limits[:, :, None]
    if ids is not None:
        q_low, q_high = id_ranges(q_ids, num_q)
        k_low, k_high = id_ranges(k_ids, num_k)
        meet &= (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
    meet = jnp.any(meet, axis=0)
    first_tile = jnp.argmax(meet, axis=1)
    last_tile = meet.shape[1] - jnp.argmax(meet[:, ::-1], axis=1)
    last_tile = jnp.where(jnp.any(meet, axis=1), last_tile, first_tile)
    return _Tiled(q, k, v, q_ids, k_ids, q_limits, num_q, num_k, first_tile, last_tile)


def _slice(x: jax.Array, index: Any, tokens: int, axis: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, index * tokens, tokens, axis)


def _scores(tiled: _Tiled, scale: float, q: jax.Array, i: Any, k: jax.Array, j: Any) -> jax.Array:
    """Return scores [B, H, num_q, num_k] of two tiles, -inf where the query may not see the key."""
    positions = j * tiled.num_k + jnp.arange(tiled.num_k)
    sees = positions <= _slice(tiled.q_limits, i, tiled.num_q, 1)[:, :, None]
    if tiled.q_ids is not None:
        q_ids = _slice(tiled.q_ids, i, tiled.num_q, 1)[:, :, None]
        k_ids = _slice(tiled.k_ids, j, tiled.num_k, 1)[:, None, :]
        sees &= (q_ids == k_ids) & (q_ids != 0)
    return jnp.where(sees[:, None], _product("bhtk,bhsk->bhts", q, k) * scale, -jnp.inf)


def _over_queries(tiled: _Tiled, step: Callable, carry: Any) -> tuple[Any, Any]:
    """Scan `step(carry, i) -> (carry, tiles)`; return tiles as arrays over all queries."""
    num_tiles = tiled.q.shape[2] // tiled.num_q
    if num_tiles == 1:
        return step(carry, 0)
    carry, tiles = lax.scan(step, carry, jnp.arange(num_tiles))

    def join(x):  # [tiles, B, H, num_q, ...] -> [B, H, T, ...]
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    return carry, jax.tree.map(join, tiles)


def _over_keys(tiled: _Tiled, i: Any, step: Callable, carry: Any) -> Any:
    if tiled.k.shape[2] == tiled.num_k:
        return step(0, carry)
    return lax.fori_loop(tiled.first_tile[i], tiled.last_tile[i], step, carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, ids, q_limits):
    return _attention_forward(options, q, k, v, ids, q_limits)[0]


def _attention_forward(options, q, k, v, ids, q_limits):
    tiled = _tiled(q, k, v, ids, q_limits)
    precise = jnp.promote_types(q.dtype, jnp.float32)

    def query_tile(carry, i):
        q_tile = _slice(tiled.q, i, tiled.num_q, 2)

        def key_tile(j, running):
            peak, total, output = running  # [B, H, num_q] twice, [B, H, num_q, V]
            k_tile = _slice(tiled.k, j, tiled.num_k, 2)
            scores = _scores(tiled, options.scale, q_tile, i, k_tile, j)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
            # A query that saw nothing yet has peak -inf; exp(-inf - 0) is 0, never NaN.
            finite_peak = jnp.where(new_peak == -jnp.inf, 0, new_peak)
            weights = jnp.exp(scores - finite_peak[..., None])
            shrink = jnp.exp(peak - finite_peak)
            values = _slice(tiled.v, j, tiled.num_k, 2)
            output = output * shrink[..., None] + _product("bhts,bhsv->bhtv", weights, values)
            return new_peak, total * shrink + jnp.sum(weights, axis=-1), output

        zeros = jnp.zeros_like(q_tile, precise, shape=(*q_tile.shape[:3], v.shape[-1]))
        start = (zeros[..., 0] - jnp.inf, zeros[..., 0], zeros)
        peak, total, output = _over_keys(tiled, i, key_tile, start)
        sees_any = total > 0
        total = jnp.where(sees_any, total, 1)
        # +inf turns every probability of a query that sees nothing into 0 in the backward pass.
        log_sum = jnp.where(sees_any, peak + jnp.log(total), jnp.inf)
        return carry, (output / total[..., None], log_sum, peak)

    _, (output, log_sum, peak) = _over_queries(tiled, query_tile, ())
    num_queries = q.shape[1]
    output = jnp.swapaxes(output[:, :, :num_queries], 1, 2).astype(options.output_dtype)
    kept = (q, k, v, ids, q_limits, output, log_sum[:, :, :num_queries])
    return (output, jnp.max(peak[:, :, :num_queries], axis=2)), kept


def _attention_backward(options, kept, cotangents):
    q, k, v, ids, q_limits, output, log_sum = kept
    d_output = cotangents[0]
    tiled = _tiled(q, k, v, ids, q_limits)
    precise = jnp.promote_types(q.dtype, jnp.float32)
    sees_any = jnp.swapaxes(log_sum < jnp.inf, 1, 2)[..., None]
    d_output = jnp.where(sees_any, d_output, 0).astype(precise)  # [B, T, H, V]
    offset = jnp.sum(d_output * output, axis=-1)
    d_output = _pad(jnp.swapaxes(d_output, 1, 2), 2, tiled.num_q)
    offset = _pad(jnp.swapaxes(offset, 1, 2), 2, tiled.num_q)
    num_extra = -log_sum.shape[2] % tiled.num_q
    log_sum = jnp.pad(log_sum, ((0, 0), (0, 0), (0, num_extra)), constant_values=jnp.inf)

    def query_tile(carry, i):
        q_tile = _slice(tiled.q, i, tiled.num_q, 2)
        d_out_tile = _slice(d_output, i, tiled.num_q, 2)
        offset_tile = _slice(offset, i, tiled.num_q, 2)[..., None]
        log_sum_tile = _slice(log_sum, i, tiled.num_q, 2)[..., None]

        def key_tile(j, running):
            d_q, d_k, d_v = running
            k_tile, v_tile = (_slice(x, j, tiled.num_k, 2) for x in (tiled.k, tiled.v))
            scores = _scores(tiled, options.scale, q_tile, i, k_tile, j)
            weights = jnp.exp(scores - log_sum_tile)
            d_weights = _product("bhtv,bhsv->bhts", d_out_tile, v_tile)
            d_scores = weights * (d_weights - offset_tile)
            d_q += _product("bhts,bhsk->bhtk", d_scores, k_tile)

            def add(total, part):
                part += _slice(total, j, tiled.num_k, 2)
                return lax.dynamic_update_slice_in_dim(total, part, j * tiled.num_k, 2)

            d_k = add(d_k, _product("bhts,bhtk->bhsk", d_scores, q_tile))
            d_v = add(d_v, _product("bhts,bhtv->bhsv", weights, d_out_tile))
            return d_q, d_k, d_v

        start = (jnp.zeros_like(q_tile, precise), *carry)
        d_q, d_k, d_v = _over_keys(tiled, i, key_tile, start)
        return (d_k, d_v), d_q

    start = (jnp.zeros_like(tiled.k, precise), jnp.zeros_like(tiled.v, precise))
    (d_k, d_v), d_q = _over_queries(tiled, query_tile, start)

    def tokens_first(gradient, operand):
        return jnp.swapaxes(gradient[:, :, : operand.shape[1]], 1, 2).astype(operand.dtype)

    d_q, d_k = d_q * options.scale, d_k * options.scale
    return tokens_first(d_q, q), tokens_first(d_k, k), tokens_first(d_v, v), None, None


_attention.defvjp(_attention_forward, _attention_backward)
