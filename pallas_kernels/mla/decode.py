"""Decoding with the latents of multi-head latent attention, kept in pages."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import (
    require_float_type,
    require_floating,
    require_integer,
    require_rank,
    require_shape,
    without_gradient,
)
from pallas_kernels.debug import check_values
from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.mla import decode_gpu, decode_tpu, decode_xla, reference

_FORMS = {
    "reference": reference.mla_decode,
    "xla": decode_xla.mla_decode,
    "mosaic_tpu": decode_tpu.mla_decode,
    "mosaic_gpu": decode_gpu.mla_decode,
}


def mla_decode(
    q_latent: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    value_width: int = 512,
    output_dtype: jax.typing.DTypeLike | None = None,
    return_log_sum: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend from the newest tokens to a paged cache of latents that all heads share.

        token[s] = pages[block_table[s // page_size], s % page_size]            [C + R]
        output[t] = sum_s softmax_s(scale * q_latent[t] . token[s]) token[s][:C]
        over s <= length - T + t

    The queries are absorbed: q_latent = [W_k^T q_nope | q_rope], and W_v maps the output to values.
    The tokens of the queries are in the cache already and counted by `lengths`. A query without
    a token to see returns 0. Entries of the table past the length, and what pages hold past it,
    do not matter (NaN included). There is no gradient: differentiating is refused.

    Lengths and used entries of the table are checked where their values are at hand at no cost, and
    in `pallas_kernels.debug_checks` everywhere. Unchecked, under `jit` for one, the nearest length
    from 0 to max_pages * page_size and the nearest page from 0 to P - 1 stand for those outside.

    Args:
        q_latent: queries [B, T, H, C + R]; T is one or a few tokens. TPU kernels take float32 or
            bfloat16, those of GPU bfloat16, "xla" and "reference" any float type.
        pages: latents [P, page_size, C + R] after their norm, with the R extra channels behind.
            Finite channels past those, zeros for one, are ignored: on TPU store whole vectors of
            128 (640 channels for 512 + 64, which is what 576 take up there anyway). Narrower
            ones lie transposed in TPU memory, and every call copies all pages. On GPU store 576.
        block_table: int [B, max_pages], the pages of each row in order.
        lengths: int [B], tokens of each row; from 0 to max_pages * page_size.
        scale: factor of the scores, (n + R)^-0.5 of the widths before absorption.
        value_width: C, the channels that are values.
        output_dtype: of the output, float32 or bfloat16; None takes q_latent.dtype.
        return_log_sum: also return log(sum_s exp(score)), with which outputs over parts of a
            context are merged.
        implementation: None, "reference", "xla", "mosaic_tpu" or "mosaic_gpu".

    Returns:
        output [B, T, H, C]; scores, softmax and sums are float32. With `return_log_sum` (output,
        log_sum float32 [B, T, H]), -inf where a query sees nothing.

    Raises:
        ValueError: shapes disagree, C exceeds the width, a length or a used entry of the table is
            out of bounds, or the implementation is unknown.
        TypeError: queries, pages or output are not floating point, or the table or the lengths
            are not integers.
        NotImplementedError: the named implementation does not run on the device or does not take
            these shapes or dtypes, or the call is differentiated.
    """
    op = "mla_decode"
    require_rank(op, "B T H C+R", q_latent=q_latent)
    require_rank(op, "P page_size C+R", pages=pages)
    require_rank(op, "B max_pages", block_table=block_table)
    require_floating(op, q_latent=q_latent, pages=pages)
    require_integer(op, block_table=block_table, lengths=lengths)
    batch, num_queries, _, width = q_latent.shape
    if pages.shape[2] < width:
        raise ValueError(
            f"{op}: pages {pages.shape} have fewer channels than q_latent {q_latent.shape}"
        )
    require_shape(op, (batch, block_table.shape[1]), "(B, max_pages)", block_table=block_table)
    require_shape(op, (batch,), "(B of q_latent)", lengths=lengths)
    if not 0 < value_width <= width:
        raise ValueError(f"{op}: value_width={value_width} is not within the {width} channels")
    if min(num_queries, *pages.shape, block_table.shape[1]) < 1:
        raise ValueError(
            f"{op}: q_latent {q_latent.shape}, pages {pages.shape} and block_table "
            f"{block_table.shape} need at least one token and one page"
        )
    _check_pages(op, pages, block_table, lengths)
    q_latent, pages = jnp.asarray(q_latent), jnp.asarray(pages)
    output_dtype = q_latent.dtype if output_dtype is None else output_dtype
    require_float_type(op, output_dtype=output_dtype)
    output_dtype = jnp.dtype(output_dtype)
    block_table = jnp.asarray(block_table, jnp.int32)
    lengths = jnp.clip(jnp.asarray(lengths, jnp.int32), 0, block_table.shape[1] * pages.shape[1])
    limits = {
        "mosaic_tpu": lambda: decode_tpu.unsupported(q_latent, pages, block_table, output_dtype),
        "mosaic_gpu": lambda: decode_gpu.unsupported(q_latent, pages, value_width, output_dtype),
    }
    form = _FORMS[choose_implementation(op, implementation, limits)]
    if 0 in q_latent.shape:
        shape = q_latent.shape[:3]
        output = jnp.zeros((*shape, value_width), output_dtype)
        return (output, jnp.full(shape, -jnp.inf, jnp.float32)) if return_log_sum else output

    def run(operands):
        return form(*operands, float(scale), value_width, output_dtype)

    run = without_gradient(run, f"{op} has no gradient; mla_attention has one, for training")
    output, log_sum = run((q_latent, pages, block_table, lengths))
    return (output, log_sum) if return_log_sum else output


def _check_pages(op: str, pages, block_table, lengths) -> None:
    """Raise ValueError for lengths that exceed the table and used entries that are no pages."""
    (num_pages, page_size, _), (batch, max_pages) = pages.shape, block_table.shape
    if batch == 0:
        return

    def summarise(xp, table, lengths):
        outside = (lengths < 0) | (lengths > max_pages * page_size)
        row = xp.argmax(outside)
        is_used = xp.arange(max_pages) * page_size < lengths[:, None]
        missing = (is_used & ((table < 0) | (table >= num_pages))).reshape(-1)
        entry = xp.argmax(missing)
        return (outside[row], row, lengths[row], missing[entry], entry, table.reshape(-1)[entry])

    def problem(is_outside, row, length, is_missing, entry, page) -> str | None:
        if is_outside:
            return (
                f"{op}: lengths[{row}] is {length}; the table has room for 0 to "
                f"{max_pages * page_size} tokens, {max_pages} pages of {page_size}"
            )
        if is_missing:
            row, place = divmod(int(entry), max_pages)
            return (
                f"{op}: block_table[{row}, {place}] is {page} and in use; pages are 0 to "
                f"{num_pages - 1}"
            )
        return None

    check_values(summarise, problem, block_table, lengths)
