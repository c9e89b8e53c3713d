"""The definition of the grouped forms: one row at a time, with the parameters of its group."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mxfp4 import MXFP4
from pallas_kernels.mxfp8 import MXFP8


def grouped_matmul(
    x: jax.Array | MXFP8, weights: jax.Array | MXFP4, group_sizes: jax.Array
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul`; float64 operands are computed in float64."""
    return _apply(lambda row, matrix: row @ matrix[0], x, (weights,), group_sizes)


def grouped_glu(x, gate, up, group_sizes, activation) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_glu`; float64 operands are computed in float64."""
    return _apply(
        lambda row, own: activation(row @ own[0], row @ own[1]), x, (gate, up), group_sizes
    )


def _apply(function, x, weights, group_sizes):
    weights = tuple(
        w.dequantize(jnp.float32, implementation="reference") if isinstance(w, MXFP4) else w
        for w in weights
    )
    if not isinstance(x, MXFP8):
        return grouped_apply(function, x, weights, group_sizes)
    # Numbers of bfloat16, computed and returned as such.
    return grouped_apply(function, x.dequantize(jnp.bfloat16), weights, group_sizes)


def grouped_apply(
    function: Callable[[jax.Array, Any], jax.Array],
    x: jax.Array,
    parameters: Any,
    group_sizes: jax.Array,
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_apply`."""
    precise = jnp.promote_types(x.dtype, jnp.float32)
    num_groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)

    def one_row(row_and_index):
        row, index = row_and_index
        group = jnp.sum(ends <= index)  # groups that end at or before this row
        belongs = group < num_groups
        own = jax.tree.map(
            lambda leaf: leaf[jnp.minimum(group, num_groups - 1)].astype(precise), parameters
        )
        row = jnp.where(belongs, row, 0).astype(precise)
        return jnp.where(belongs, function(row[None], own)[0], 0)

    return jax.lax.map(one_row, (x, jnp.arange(x.shape[0]))).astype(x.dtype)
