"""Latent attention of tokens on a ring of devices: latents go round, one device's after the other.

Each device expands the keys of one stretch at a time for its own queries, and joins what it finds
(`pallas_kernels.mla.parts`), so that neither all keys nor all latents are ever in its memory. The
backward pass sends the latents round once more, and their gradients with them, back to where they
came from.
"""

import functools

import jax
import jax.numpy as jnp

from k3jax.ops.layout import Axes, chunks_of, num_ranks
from k3jax.ops.mla_keys import expand
from pallas_kernels.mla.parts import attention_part, attention_part_gradients, join_parts


def ring_attention(
    q: jax.Array,
    joint: jax.Array,
    kv_b: jax.Array,
    segment_ids: jax.Array | None,
    *,
    nope_dim: int,
    layout: str,
    axes: Axes,
) -> jax.Array:
    """Causal attention of this device's queries to all keys, inside of `meshes.per_device`.

    Args:
        q: [B, T, H, n + r], the queries of this device in the order of `layout`.
        joint: [B, T, C + r], latents and shared channels of the same tokens.
        kv_b: [C, H, n + V].
        segment_ids: [B, T] of the same tokens, or None.
        nope_dim: n.
        layout: "contiguous" or "balanced".
        axes: mesh axes of the ring.

    Returns:
        [B, T, H, V] in q's dtype.
    """
    return _ring(nope_dim, layout, axes, q, joint, kv_b, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _ring(nope_dim, layout, axes, q, joint, kv_b, segment_ids):
    return _forward(nope_dim, layout, axes, q, joint, kv_b, segment_ids)[0]


def _next(x, axes: Axes):
    """Every array on to the device behind."""
    ranks = num_ranks(axes)
    return jax.lax.ppermute(x, axes, [(rank, (rank + 1) % ranks) for rank in range(ranks)])


def _pairs(q, joint, ids, of_ids, step, layout, axes):
    """Chunks of queries and of the keys that are here in a step, and what tells who sees whom.

    Yields for each pair the number of either chunk and options of `attention_part`.
    """
    ranks = num_ranks(axes)
    rank = jax.lax.axis_index(axes)
    places, of_places = (chunks_of(r, ranks, layout) for r in (rank, (rank - step) % ranks))
    size = q.shape[1] // len(places)
    chunk = lambda x, n: None if x is None else x[:, n * size : (n + 1) * size]  # noqa: E731
    for n, place in enumerate(places):
        for m, of_place in enumerate(of_places):
            yield (
                n,
                m,
                {
                    "q_offset": (place - of_place) * size,
                    "segment_ids": chunk(ids, n),
                    "kv_segment_ids": chunk(of_ids, m),
                    "scale": q.shape[-1] ** -0.5,
                },
            )


def _split(x: jax.Array, layout: str, axis: int = 1) -> list[jax.Array]:
    return jnp.split(x, len(chunks_of(0, 1, layout)), axis=axis)


def _forward(nope_dim, layout, axes, q, joint, kv_b, segment_ids):
    queries = _split(q, layout)
    precise = jnp.promote_types(q.dtype, jnp.float32)
    value_dim = kv_b.shape[-1] - nope_dim
    found = [
        (
            jnp.zeros((*chunk.shape[:3], value_dim), precise),
            jnp.full((chunk.shape[0], chunk.shape[2], chunk.shape[1]), -jnp.inf, precise),
        )
        for chunk in queries
    ]

    def turn(step, carry):
        found, joint, ids = carry
        k, v = (_split(x, layout) for x in expand(joint, kv_b, nope_dim))
        found = list(found)
        for n, m, options in _pairs(q, joint, segment_ids, ids, step, layout, axes):
            part = attention_part(queries[n], k[m], v[m], **options)
            found[n] = join_parts(*found[n], *part)
        return found, joint, ids

    def step(carry, number):
        found, joint, ids = turn(number, carry)
        return (found, *_next((joint, ids), axes)), None

    last = num_ranks(axes) - 1
    carry, _ = jax.lax.scan(step, (found, joint, segment_ids), jnp.arange(last))
    found, _, _ = turn(last, carry)
    output = jnp.concatenate([o for o, _ in found], axis=1).astype(q.dtype)
    log_sum = jnp.concatenate([s for _, s in found], axis=2)
    return output, (q, joint, kv_b, segment_ids, output, log_sum)


def _backward(nope_dim, layout, axes, kept, d_output):
    q, joint, kv_b, segment_ids, output, log_sum = kept
    queries, outputs, d_outputs = (_split(x, layout) for x in (q, output, d_output))
    log_sums = _split(log_sum, layout, axis=2)
    precise = jnp.promote_types(q.dtype, jnp.float32)

    def step(carry, number):
        d_queries, d_kv_b, joint, d_joint, ids = carry
        (k, v), back = jax.vjp(lambda *x: expand(*x, nope_dim), joint, kv_b)
        k, v = _split(k, layout), _split(v, layout)
        d_queries = list(d_queries)
        d_k, d_v = ([jnp.zeros_like(x, precise) for x in whole] for whole in (k, v))
        for n, m, options in _pairs(q, joint, segment_ids, ids, number, layout, axes):
            d_q, d_key, d_value = attention_part_gradients(
                queries[n], k[m], v[m], outputs[n], log_sums[n], d_outputs[n], **options
            )
            d_queries[n] += d_q
            d_k[m] += d_key
            d_v[m] += d_value
        d_k, d_v = (jnp.concatenate(x, axis=1) for x in (d_k, d_v))
        more, more_kv_b = back((d_k.astype(q.dtype), d_v.astype(q.dtype)))
        d_joint, d_kv_b = d_joint + more, d_kv_b + more_kv_b
        # After a whole round the gradients are where their latents were.
        return (d_queries, d_kv_b, *_next((joint, d_joint, ids), axes)), None

    start = (
        [jnp.zeros_like(x, precise) for x in queries],
        jnp.zeros_like(kv_b, precise),
        joint,
        jnp.zeros_like(joint, precise),
        segment_ids,
    )
    (d_queries, d_kv_b, _, d_joint, _), _ = jax.lax.scan(step, start, jnp.arange(num_ranks(axes)))
    d_q = jnp.concatenate(d_queries, axis=1)
    return d_q.astype(q.dtype), d_joint.astype(joint.dtype), d_kv_b.astype(kv_b.dtype), None


_ring.defvjp(_forward, _backward)
