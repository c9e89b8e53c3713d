"""Products of row groups with one matrix per group, and any function applied group by group."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checks import require_floating, require_integer, require_rank, require_shape
from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.grouped_matmul import reference, xla
from pallas_kernels.mxfp4 import MXFP4

_PRODUCTS = {"reference": reference.grouped_matmul, "xla": xla.grouped_matmul}
_APPLICATIONS = {"reference": reference.grouped_apply, "xla": xla.grouped_apply}


def grouped_matmul(
    x: jax.Array,
    weights: jax.Array | MXFP4,
    group_sizes: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Multiply each group of consecutive rows with the matrix of its group.

        output[m] = x[m] @ weights[e]     for rows m of group e,
        output[m] = 0                     for rows m >= sum(group_sizes).

    Group e holds the `group_sizes[e]` rows after those of the groups before it; groups may be
    empty. Rows past the last group are not read (they may hold NaN) and get no gradient.

    Args:
        x: rows sorted by group [M, K], float32 or bfloat16.
        weights: one matrix per group [E, K, N]; an `MXFP4` stack is multiplied as stored and
            gets no gradient.
        group_sizes: int [E] with a sum of at most M.
        implementation: None, "reference" or "xla".

    Returns:
        output [M, N] in x.dtype, accumulated in float32. Gradients of x and weights are
        accumulated in float32 and returned in their own dtypes.

    Raises:
        ValueError: shapes disagree, or the implementation is unknown.
        TypeError: x or weights is not floating point, or group_sizes is not integer.
        NotImplementedError: the implementation is known but not built.
    """
    form = _PRODUCTS[choose_implementation("grouped_matmul", implementation)]
    require_rank("grouped_matmul", "M K", x=x)
    require_rank("grouped_matmul", "E K N", weights=weights)
    if isinstance(weights, MXFP4):
        weights.check("grouped_matmul")
    else:
        require_floating("grouped_matmul", weights=weights)
    if weights.shape[1] != x.shape[1]:
        raise ValueError(
            f"grouped_matmul: weights {weights.shape} [E, K, N] cannot multiply x {x.shape} [M, K]"
        )
    _check_groups("grouped_matmul", x, weights.shape[0], group_sizes)
    # Rows may be chosen by traced indices, which numpy arrays do not take.
    x, weights = jax.tree.map(jnp.asarray, (x, weights))
    return form(x, weights, jnp.asarray(group_sizes, jnp.int32))


def grouped_apply(
    function: Callable[[jax.Array, Any], jax.Array],
    x: jax.Array,
    parameters: Any,
    group_sizes: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Apply one row-wise function to each group of rows with the parameters of that group.

        output[m] = function(x[m : m+1], parameters[e])[0]     for rows m of group e, else 0.

    This is `grouped_matmul` for more than a product: with a whole expert MLP as `function` its
    hidden activations are neither stored nor written to memory, and the backward pass, which
    evaluates `function` again, keeps only `x` and `parameters`.

    Args:
        function: maps (rows [R, K], parameters of one group) to [R, N] for any R, each row by
            itself. It sees float32 (or wider) arrays and must not close over traced values.
        x: rows sorted by group [M, K], float32 or bfloat16.
        parameters: tree of floating point arrays [E, ...].
        group_sizes: int [E] with a sum of at most M.
        implementation: None, "reference" or "xla".

    Returns:
        output [M, N] in x.dtype; rows past the last group are 0, are not read and get no gradient.

    Raises:
        ValueError: shapes disagree, there are no parameters, or the implementation is unknown.
        TypeError: x or a parameter is not floating point, or group_sizes is not integer.
        NotImplementedError: the implementation is known but not built.
    """
    form = _APPLICATIONS[choose_implementation("grouped_matmul", implementation)]
    require_rank("grouped_apply", "M K", x=x)
    leaves = jax.tree.leaves(parameters)
    if not leaves:
        raise ValueError("grouped_apply: parameters has no arrays; pass a tree of [E, ...] arrays")
    for leaf in leaves:
        require_floating("grouped_apply", parameters=leaf)
    num_groups = {leaf.shape[:1] for leaf in leaves}
    if len(num_groups) != 1 or num_groups == {()}:
        raise ValueError(
            f"grouped_apply: parameters have leading sizes {sorted(num_groups)}; "
            "all need one entry per group"
        )
    _check_groups("grouped_apply", x, leaves[0].shape[0], group_sizes)
    return form(function, x, parameters, jnp.asarray(group_sizes, jnp.int32))


def _check_groups(op: str, x: jax.Array, num_groups: int, group_sizes: jax.Array) -> None:
    require_floating(op, x=x)
    require_shape(op, (num_groups,), "(one entry per group)", group_sizes=group_sizes)
    require_integer(op, group_sizes=group_sizes)
    if num_groups == 0:
        raise ValueError(f"{op}: there are no groups; at least one is needed")
    if not isinstance(group_sizes, jax.core.Tracer):
        sizes, rows = np.asarray(group_sizes), x.shape[0]  # numpy: also concrete under jit
        total = int(sizes.sum())
        if total > rows or int(sizes.min()) < 0:
            raise ValueError(
                f"{op}: group_sizes {sizes.tolist()} sum to {total}; they must not be "
                f"negative nor sum to more than the {rows} rows of x"
            )
