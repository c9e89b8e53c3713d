"""Latent decoding in jax.numpy: blocks of pages are gathered and folded into an online softmax."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mla.options import as_wide_as
from pallas_kernels.tiles import choose_tiles


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Least number of tokens gathered at a time, filled to whole pages."""

    tokens: int = 512


def mla_decode(
    q_latent: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    lengths: jax.Array,
    scale: float,
    value_width: int,
    output_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.mla_decode`."""
    q_latent = as_wide_as(q_latent, pages)
    batch, num_queries, heads, width = q_latent.shape
    page_size, dtype = pages.shape[1], pages.dtype
    precise = jnp.promote_types(jnp.promote_types(q_latent.dtype, dtype), jnp.float32)
    precision = lax.Precision.HIGHEST if dtype != jnp.bfloat16 else None
    tiles = choose_tiles("mla_decode_xla", DecodeTiles())
    per_block = min(-(-tiles.tokens // page_size), block_table.shape[1])
    block_table = jnp.clip(block_table, 0, pages.shape[0] - 1)
    block_table = jnp.pad(block_table, ((0, 0), (0, -block_table.shape[1] % per_block)))
    limits = (lengths - num_queries)[:, None] + jnp.arange(num_queries)  # [B, T]

    def product(letters, x, tokens):
        return jnp.einsum(
            letters, x.astype(dtype), tokens, precision=precision, preferred_element_type=precise
        )

    def block(j, running):
        peak, total, output = running  # [B, T, H] twice, [B, T, H, C]
        table = lax.dynamic_slice_in_dim(block_table, j * per_block, per_block, 1)
        tokens = pages[table].reshape(batch, per_block * page_size, width)
        positions = j * per_block * page_size + jnp.arange(per_block * page_size)
        # What lies past the length has weight 0, but 0 * NaN would still poison the sum.
        tokens = jnp.where((positions < lengths[:, None])[..., None], tokens, 0)
        sees = (positions <= limits[:, :, None])[:, :, None]  # [B, T, 1, tokens]
        scores = product("bthc,bsc->bths", q_latent, tokens) * scale
        scores = jnp.where(sees, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        finite_peak = jnp.where(new_peak == -jnp.inf, 0, new_peak)
        weights = jnp.exp(scores - finite_peak[..., None])
        shrink = jnp.exp(peak - finite_peak)
        part = product("bths,bsc->bthc", weights, tokens[..., :value_width])
        return (
            new_peak,
            total * shrink + jnp.sum(weights, axis=-1),
            output * shrink[..., None] + part,
        )

    zeros = jnp.zeros_like(q_latent, precise, shape=(batch, num_queries, heads, value_width))
    start = (zeros[..., 0] - jnp.inf, zeros[..., 0], zeros)
    tokens_per_block = per_block * page_size
    num_blocks = jnp.minimum(
        (jnp.max(lengths) + tokens_per_block - 1) // tokens_per_block,
        block_table.shape[1] // per_block,
    )
    peak, total, output = lax.fori_loop(0, num_blocks, block, start)
    sees_any = total > 0
    total = jnp.where(sees_any, total, 1)
    log_sum = jnp.where(sees_any, peak + jnp.log(total), -jnp.inf)
    return (output / total[..., None]).astype(output_dtype), log_sum
