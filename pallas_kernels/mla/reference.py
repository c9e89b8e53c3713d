"""The definition of attention with segments: one query token at a time."""

import jax
import jax.numpy as jnp

from pallas_kernels.mla.options import AttentionOptions, query_limits


def mla_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    options: AttentionOptions,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    q_offset: int | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.mla_attention`; float64 operands are computed in float64."""
    q_limits = query_limits(q_offset, *q.shape[:2], k.shape[1], options.causal)
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
        kv_segment_ids = jnp.ones(k.shape[:2], jnp.int32)
    precise = jnp.promote_types(q.dtype, jnp.float32)
    positions = jnp.arange(k.shape[1])

    def attend(token):
        query, segment_id, limit = token  # [B, H, K], [B], [B]
        sees = (positions <= limit[:, None]) & (kv_segment_ids == segment_id[:, None])
        sees &= (segment_id != 0)[:, None]  # [B, S]
        keys = jnp.where(sees[:, :, None, None], k, 0).astype(precise)
        values = jnp.where(sees[:, :, None, None], v, 0).astype(precise)
        sees_any = jnp.any(sees, axis=1)
        query = jnp.where(sees_any[:, None, None], query, 0).astype(precise)
        scores = options.scale * jnp.einsum("bhk,bshk->bhs", query, keys)
        # A query that sees nothing takes the softmax of zeros; its output is replaced below.
        visible = (sees | ~sees_any[:, None])[:, None, :]
        largest = jnp.max(jnp.where(sees[:, None, :], scores, -jnp.inf), axis=-1)
        probabilities = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        output = jnp.einsum("bhs,bshv->bhv", probabilities, values)
        return jnp.where(sees_any[:, None, None], output, 0), largest

    tokens = tuple(jnp.moveaxis(array, 1, 0) for array in (q, segment_ids, q_limits))
    output, largest = jax.lax.map(attend, tokens)
    output = jnp.moveaxis(output, 0, 1).astype(options.output_dtype)
    return output, jax.lax.stop_gradient(jnp.max(largest, axis=0))


def _sees(q, k, options, segment_ids, kv_segment_ids, q_offset) -> jax.Array:
    """Which keys each query sees [B, T, S]."""
    q_limits = query_limits(q_offset, *q.shape[:2], k.shape[1], options.causal)
    sees = jnp.arange(k.shape[1]) <= q_limits[:, :, None]
    if segment_ids is not None:
        ids = segment_ids[:, :, None]
        sees &= (ids == kv_segment_ids[:, None, :]) & (ids != 0)
    return sees


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
    sees = _sees(q, k, options, segment_ids, kv_segment_ids, q_offset)[:, None]
    precise = jnp.promote_types(q.dtype, jnp.float32)
    scores = options.scale * jnp.einsum("bthk,bshk->bhts", q.astype(precise), k.astype(precise))
    log_sum = jax.nn.logsumexp(jnp.where(sees, scores, -jnp.inf), axis=-1)
    log_sum = jnp.where(sees.any(-1), log_sum, jnp.inf)
    weights = jnp.where(sees, jnp.exp(scores - log_sum[..., None]), 0)
    output = jnp.einsum("bhts,bshv->bthv", weights, v.astype(precise))
    return output.astype(options.output_dtype), log_sum


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
    sees = _sees(q, k, options, segment_ids, kv_segment_ids, q_offset)[:, None]
    dtypes = q.dtype, k.dtype, v.dtype
    precise = jnp.promote_types(q.dtype, jnp.float32)
    q, k, v, output, d_output = (x.astype(precise) for x in (q, k, v, output, d_output))
    scores = options.scale * jnp.einsum("bthk,bshk->bhts", q, k)
    weights = jnp.where(sees, jnp.exp(scores - log_sum[..., None]), 0)
    share = jnp.swapaxes(jnp.sum(output * d_output, axis=-1), 1, 2)[..., None]
    d_scores = weights * (jnp.einsum("bthv,bshv->bhts", d_output, v) - share) * options.scale
    gradients = (
        jnp.einsum("bhts,bshk->bthk", d_scores, k),
        jnp.einsum("bhts,bthk->bshk", d_scores, q),
        jnp.einsum("bhts,bthv->bshv", weights, d_output),
    )
    return tuple(x.astype(dtype) for x, dtype in zip(gradients, dtypes))


def mla_decode(
    q_latent: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    lengths: jax.Array,
    scale: float,
    value_width: int,
    output_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.mla_decode`; float64 operands are computed in float64."""
    precise = jnp.promote_types(q_latent.dtype, jnp.float32)
    num_queries = q_latent.shape[1]

    def row(queries, table, length):  # [T, H, C+R], [max_pages], []
        tokens = pages[jnp.clip(table, 0, pages.shape[0] - 1)].reshape(-1, pages.shape[2])
        tokens = tokens[:, : queries.shape[2]]
        positions = jnp.arange(tokens.shape[0])
        tokens = jnp.where((positions < length)[:, None], tokens, 0).astype(precise)
        limits = length - num_queries + jnp.arange(num_queries)
        sees = (positions <= limits[:, None])[:, None]  # [T, 1, S]
        scores = scale * jnp.einsum("thc,sc->ths", queries.astype(precise), tokens)
        log_sum = jax.nn.logsumexp(jnp.where(sees, scores, -jnp.inf), axis=-1)
        finite = jnp.where(jnp.isfinite(log_sum), log_sum, 0)
        weights = jnp.where(sees, jnp.exp(scores - finite[..., None]), 0)
        return jnp.einsum("ths,sc->thc", weights, tokens[:, :value_width]), log_sum

    output, log_sum = jax.lax.map(lambda x: row(*x), (q_latent, block_table, lengths))
    return output.astype(output_dtype), log_sum
