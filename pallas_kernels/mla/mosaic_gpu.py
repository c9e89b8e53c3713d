"""Flash attention on Hopper: one kernel forward, two backward (dk and dv; dq).

Operands are bfloat16, sums float32. Tokens are filled to whole blocks in a copy where their number
is not a multiple of 128, and with segments what padding holds is replaced by zeros before the
kernels read it.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.checks import align_varying, empty
from pallas_kernels.mla.mosaic_gpu_backward import (
    KeyGradientTiles,
    QueryGradientTiles,
    key_gradients,
    query_gradients,
)
from pallas_kernels.mla.mosaic_gpu_forward import forward, forward_tiles
from pallas_kernels.mla.mosaic_gpu_tile import GROUPS, LOG2_E, ROWS, Call
from pallas_kernels.mla.options import AttentionOptions, tile_ranges
from pallas_kernels.tiles import choose_tiles

_KEY_WIDTHS, _VALUE_WIDTHS = (64, 128, 192), (64, 128)
_BLOCK = GROUPS * ROWS


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array, output_dtype: jnp.dtype) -> str | None:
    """Say why the kernels do not take these arguments, or None."""
    if problem := empty(q=q, v=v):
        return problem
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; all must be bfloat16"
    if output_dtype not in (jnp.float32, jnp.bfloat16):
        return f"output_dtype={output_dtype} is neither float32 nor bfloat16"
    if q.shape[-1] not in _KEY_WIDTHS or v.shape[-1] not in _VALUE_WIDTHS:
        return (
            f"head widths K={q.shape[-1]}, V={v.shape[-1]} are not in {_KEY_WIDTHS} and "
            f"{_VALUE_WIDTHS}"
        )
    return None


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
    num_queries = q.shape[1]
    call, *operands = _arrange(q, k, v, options, segment_ids, kv_segment_ids, q_offset)
    output, row_max = _attention(call, *operands)
    largest = jnp.max(row_max[:, :, :num_queries], axis=2) / LOG2_E
    return output[:, :num_queries], largest


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
    num_queries = q.shape[1]
    call, *operands = _arrange(q, k, v, options, segment_ids, kv_segment_ids, q_offset)
    (output, _), (*_, log_sum) = _attention_forward(call, *operands)
    return output[:, :num_queries], log_sum[:, :, :num_queries] / LOG2_E


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

    def arrange(q, k, v):
        call, *operands, ids, offset = _arrange(
            q, k, v, options, segment_ids, kv_segment_ids, q_offset
        )
        return tuple(operands), (call, ids, offset)

    operands, back, (call, ids, offset) = jax.vjp(arrange, q, k, v, has_aux=True)
    extra = call.num_queries - log_sum.shape[2]
    log_sum = jnp.pad(log_sum, ((0, 0), (0, 0), (0, extra)), constant_values=jnp.inf) * LOG2_E
    if extra:
        output, d_output = _fill(output), _fill(d_output)
    kept = (*operands, ids, offset, output, log_sum)
    return back(_attention_backward(call, kept, (d_output, None))[:3])


def _arrange(q, k, v, options, segment_ids, kv_segment_ids, q_offset):
    """The call, and q, k, v, ids and offset as the kernels read them."""
    (batch, num_queries, heads, key_width), num_keys = q.shape, k.shape[1]
    offset = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), (batch,))
    if segment_ids is None and (num_queries % _BLOCK or num_keys % _BLOCK):
        # What fills the last block is padding.
        segment_ids = jnp.ones((batch, num_queries), jnp.int32)
        kv_segment_ids = jnp.ones((batch, num_keys), jnp.int32)
    ids = None
    if segment_ids is None:
        q, k, v, offset = align_varying(q, k, v, offset)
    else:
        q, k, v, offset, *ids = align_varying(q, k, v, offset, segment_ids, kv_segment_ids)
        q, k, v = _real(q, ids[0]), _real(k, ids[1]), _real(v, ids[1])
        q, ids[0] = _fill(q), _fill(ids[0])
        k, v, ids[1] = _fill(k), _fill(v), _fill(ids[1])
        ids = tuple(ids)
    sees_all_at_last = isinstance(q_offset, int) and q_offset + num_queries >= num_keys
    if options.causal and not sees_all_at_last:
        # A weight of 0 does not forgive what a key past the last query may hold.
        seen = jnp.arange(k.shape[1]) < offset[:, None] + num_queries
        k, v = _real(k, seen), _real(v, seen)
    call = Call(
        options=options,
        batch=batch,
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        heads=heads,
        key_width=key_width,
        value_width=v.shape[-1],
        has_ids=ids is not None,
    )
    return call, q, k, v, ids, offset


def _real(x: jax.Array, is_real: jax.Array) -> jax.Array:
    return jnp.where((is_real != 0)[:, :, None, None], x, 0)


def _fill(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % _BLOCK), *[(0, 0)] * (x.ndim - 2)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call, q, k, v, ids, offset):
    return _attention_forward(call, q, k, v, ids, offset)[0]


def _attention_forward(call, q, k, v, ids, offset):
    tiles = forward_tiles(call)
    ranges = tile_ranges(call.options.causal, ids, offset, call.num_queries, call.num_keys,
                         num_q=_BLOCK, num_k=tiles.keys, over_keys=True)  # fmt: skip
    output, log_sum, row_max = forward(call, tiles, q, k, v, ids, offset, ranges)
    return (output, row_max), (q, k, v, ids, offset, output, log_sum)


def _attention_backward(call, kept, cotangents):
    q, k, v, ids, offset, output, log_sum = kept
    d_output = cotangents[0]
    if ids is not None:
        d_output = _real(d_output, ids[0])
    share = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), axis=3)
    operands = (q, k, v, d_output.astype(q.dtype), log_sum, jnp.swapaxes(share, 1, 2), ids, offset)

    def ranges(**sizes):
        return tile_ranges(
            call.options.causal, ids, offset, call.num_queries, call.num_keys, **sizes
        )

    tiles = choose_tiles("mla_attention_key_gradients_gpu", KeyGradientTiles())
    of_keys = ranges(num_q=tiles.queries, num_k=_BLOCK, over_keys=False)
    d_k, d_v = key_gradients(call, tiles, *operands, of_keys)
    tiles = choose_tiles("mla_attention_query_gradients_gpu", QueryGradientTiles())
    of_queries = ranges(num_q=_BLOCK, num_k=tiles.keys, over_keys=True)
    return query_gradients(call, tiles, *operands, of_queries), d_k, d_v, None, None


_attention.defvjp(_attention_forward, _attention_backward)
