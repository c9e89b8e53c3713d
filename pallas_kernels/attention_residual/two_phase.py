"""The depth mixture in two phases: the bank once for all layers of a block, then layer by layer.

Within a block of layers the bank does not change; only the current sum does. The first phase reads
the bank once for the queries of all those layers, the second merges the current sum in.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention_residual import (
    mosaic_gpu_two_phase,
    mosaic_tpu_two_phase,
    reference,
    rows,
    xla,
)
from pallas_kernels.checks import require_floating, require_rank, require_shape
from pallas_kernels.debug import check_values
from pallas_kernels.dispatch import choose_implementation

_BLOCK_FORMS = {
    "reference": reference.attention_residual_block,
    "xla": xla.attention_residual_block,
    "mosaic_tpu": mosaic_tpu_two_phase.attention_residual_block,
    "mosaic_gpu": mosaic_gpu_two_phase.attention_residual_block,
}
_MERGE_FORMS = {
    "reference": reference.attention_residual_merge,
    "xla": xla.attention_residual_merge,
    "mosaic_tpu": mosaic_tpu_two_phase.attention_residual_merge,
    "mosaic_gpu": mosaic_gpu_two_phase.attention_residual_merge,
}


class DepthPartial(NamedTuple):
    """Softmax over the bank entries alone, not normalised yet, for each of Q queries.

    Its gradients are right for whatever does not depend on the maximum that was subtracted, as
    `attention_residual_merge` does not; that of `maximum` itself is taken as zero.

    Attributes:
        weighted: sum of exp(score - maximum) times the row [Q, B, T, D] float32.
        maximum: largest score [Q, B, T] float32, -inf without entries.
        total: sum of exp(score - maximum) [Q, B, T] float32.
    """

    weighted: jax.Array
    maximum: jax.Array
    total: jax.Array


def attention_residual_block(
    bank: jax.Array,
    queries: jax.Array,
    count: int | jax.Array,
    *,
    eps: float,
    implementation: str | None = None,
) -> DepthPartial:
    """Return the part of the bank in the mixtures of several queries, reading the bank once.

    Args:
        bank: blocks [N, B, T, D], of which the first `count` exist; B and T may be 0 with "xla"
            (and None). Kernels take float32 or bfloat16, "xla" and "reference" any float type.
        queries: norm weight times projection weight [Q, D] of the layers that share the bank.
        count: number of entries that exist, an int or int32 []; others are not read. A
            traced count out of range gives NaN, and is reported in `debug_checks`.
        eps: added to the mean square, positive.
        implementation: None, "reference", "xla", "mosaic_tpu" or "mosaic_gpu".

    Raises:
        ValueError: shapes disagree, count is out of range, eps is not positive, or the
            implementation is unknown.
        TypeError: an array is not floating point, or count is not an integer.
        NotImplementedError: the named kernel does not take these arguments or this device.
    """
    op = "attention_residual_block"
    require_rank(op, "N B T D", bank=bank)
    require_rank(op, "Q D", queries=queries)
    require_floating(op, bank=bank, queries=queries)
    require_shape(op, (queries.shape[0], bank.shape[-1]), "(Q, D of bank)", queries=queries)
    rows.check_eps(op, eps)
    count, factor = rows.checked_count(op, count, bank.shape[0], bank.shape[0])
    if not isinstance(count, int):
        queries = queries * factor.astype(queries.dtype)
    limits = {
        "mosaic_tpu": lambda: mosaic_tpu_two_phase.unsupported(bank, queries),
        "mosaic_gpu": lambda: mosaic_gpu_two_phase.unsupported(bank, queries),
    }
    form = _BLOCK_FORMS[choose_implementation(op, implementation, limits)]
    return DepthPartial(*form(bank, queries, count, eps))


def attention_residual_merge(
    partial: DepthPartial,
    current: jax.Array,
    query: jax.Array,
    *,
    index: int | jax.Array,
    eps: float,
    implementation: str | None = None,
) -> jax.Array:
    """Return the mixture [B, T, D] of the bank and the current sum, in current.dtype.

    Equal to the first result of `attention_residual` with the bank that `partial` was made of.

    Args:
        partial: of `attention_residual_block`.
        current: running sum of the present block [B, T, D]; types as for the bank.
        query: the layer's own [D].
        index: which of the queries of `partial` it is, an int or int32 []. A traced
            index out of range gives NaN, and is reported in `debug_checks`.
        eps: added to the mean square, positive.
        implementation: None, "reference", "xla", "mosaic_tpu" or "mosaic_gpu".

    Raises:
        ValueError: shapes disagree, index is out of range, eps is not positive, or the
            implementation is unknown.
        TypeError: an array is not floating point, or index is not an integer.
        NotImplementedError: the named kernel does not take these arguments or this device.
    """
    op = "attention_residual_merge"
    require_rank(op, "B T D", current=current)
    require_floating(op, current=current, query=query, weighted=partial.weighted)
    require_shape(op, current.shape[-1:], "(D of current)", query=query)
    num_queries = partial.weighted.shape[0]
    expected = (num_queries, *current.shape)
    require_shape(op, expected, "(Q, shape of current)", weighted=partial.weighted)
    require_shape(op, expected[:-1], "(Q, B, T)", maximum=partial.maximum, total=partial.total)
    if not jnp.issubdtype(jnp.result_type(index), jnp.integer) or jnp.ndim(index) != 0:
        raise TypeError(f"{op}: index={index} must be an int or an int32 scalar")
    rows.check_eps(op, eps)

    def problem(value) -> str | None:
        if 0 <= value < num_queries:
            return None
        return f"{op}: index={value} is outside 0..{num_queries - 1}, the queries"

    if isinstance(index, jax.core.Tracer):
        check_values(lambda xp, value: (value,), problem, index)
        fits = (index >= 0) & (index < num_queries)
        index = jnp.where(fits, index, 0)
        query = query * jnp.where(fits, 1, jnp.nan).astype(query.dtype)
    else:
        index = int(index)
        if message := problem(index):
            raise ValueError(message)
    limits = {
        "mosaic_tpu": lambda: rows.unsupported_row(current),
        "mosaic_gpu": lambda: rows.unsupported_row(current),
    }
    name = choose_implementation(op, implementation, limits)
    maximum, total = partial.maximum[index], partial.total[index]
    if name in ("mosaic_tpu", "mosaic_gpu"):
        return _MERGE_FORMS[name](partial.weighted, index, maximum, total, current, query, eps)
    return _MERGE_FORMS[name](partial.weighted[index], maximum, total, current, query, eps)
