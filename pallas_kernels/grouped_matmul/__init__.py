"""Products of row groups with one matrix per group, and any function applied group by group."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checks import (
    require_floating,
    require_integer,
    require_pure,
    require_rank,
    require_shape,
)
from pallas_kernels.debug import check_values
from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.grouped_matmul import mosaic_gpu, mosaic_tpu, reference, xla
from pallas_kernels.grouped_matmul.activations import SituGLU, SwiGLU
from pallas_kernels.mxfp4 import MXFP4
from pallas_kernels.mxfp8 import MXFP8

__all__ = ["SituGLU", "SwiGLU", "choose", "grouped_apply", "grouped_glu", "grouped_matmul"]

Activation = Callable[[jax.Array, jax.Array], jax.Array]

_PRODUCTS = {
    "reference": reference.grouped_matmul,
    "xla": xla.grouped_matmul,
    "mosaic_tpu": mosaic_tpu.grouped_matmul,
    "mosaic_gpu": mosaic_gpu.grouped_matmul,
}
_GATED = {
    "reference": reference.grouped_glu,
    "xla": xla.grouped_glu,
    "mosaic_tpu": mosaic_tpu.grouped_glu,
    "mosaic_gpu": mosaic_gpu.grouped_glu,
}
_APPLICATIONS = {"reference": reference.grouped_apply, "xla": xla.grouped_apply}
_LIMITS = {"mosaic_tpu": mosaic_tpu.unsupported, "mosaic_gpu": mosaic_gpu.unsupported}


def grouped_matmul(
    x: jax.Array | MXFP8,
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
        x: rows sorted by group [M, K]; M = 0 with "xla" (and None). Kernels take float32 or
            bfloat16, "xla" and "reference" any float type; for `MXFP4` weights it may be `MXFP8`,
            which stands for its dequantised numbers and gets no gradient.
        weights: one matrix per group [E, K, N]; an `MXFP4` stack is multiplied as stored and
            gets no gradient.
        group_sizes: int [E] with a sum of at most M; checked where it is concrete, and in
            `pallas_kernels.debug_checks` everywhere.
        implementation: None, "reference", "xla", "mosaic_tpu" or "mosaic_gpu".

    Returns:
        output [M, N] in x.dtype (bfloat16 for `MXFP8`), accumulated in float32. Gradients of x and
        weights are accumulated in float32 and returned in their own dtypes.

    Raises:
        ValueError: shapes disagree, or the implementation is unknown.
        TypeError: x or weights is not floating point, group_sizes is not integer, or x is `MXFP8`
            and weights are not `MXFP4`.
        NotImplementedError: the named implementation does not run on the device or does not take
            these shapes or dtypes.
    """
    op = "grouped_matmul"
    x, weights, group_sizes = _checked(op, x, {"weights": weights}, group_sizes)
    return _PRODUCTS[choose(op, implementation, x, *weights)](x, *weights, group_sizes)


def grouped_glu(
    x: jax.Array | MXFP8,
    gate: jax.Array | MXFP4,
    up: jax.Array | MXFP4,
    group_sizes: jax.Array,
    *,
    activation: Activation,
    implementation: str | None = None,
) -> jax.Array:
    """The activation of two grouped products, which themselves need not be written to memory.

        output[m] = activation(x[m] @ gate[e], x[m] @ up[e])     for rows m of group e, else 0.

    The backward pass computes both products again.

    Args:
        x: as in `grouped_matmul`.
        gate: one matrix per group [E, K, N], or an `MXFP4` stack, which gets no gradient.
        up: the same.
        group_sizes: int [E] with a sum of at most M.
        activation: elementwise function of the two products, `SituGLU(4.0, 25.0)` for the released
            model. It must not close over traced values and, to be compiled once, should be hashable
            by value.
        implementation: None, "reference", "xla", "mosaic_tpu" or "mosaic_gpu".

    Returns:
        output [M, N] in x.dtype (bfloat16 for `MXFP8`).

    Raises:
        ValueError: shapes disagree, or the implementation is unknown.
        TypeError: an array is not floating point, group_sizes is not integer, one of gate and up
            is packed and the other is not, x is `MXFP8` and they are not packed, or activation
            is no function or closes over a traced value.
        NotImplementedError: the named implementation does not run on the device or does not take
            these shapes or dtypes.
    """
    op = "grouped_glu"
    advice = "pass a function of (gate, up) of constants only, SituGLU(4.0, 25.0) or SwiGLU()"
    require_pure(op, advice, activation=activation)
    if isinstance(gate, MXFP4) != isinstance(up, MXFP4):
        raise TypeError(f"{op}: one of gate and up is MXFP4 and the other is not")
    x, (gate, up), group_sizes = _checked(op, x, {"gate": gate, "up": up}, group_sizes)
    if gate.shape != up.shape:
        raise ValueError(f"{op}: gate {gate.shape} and up {up.shape} must have one shape")
    form = _GATED[choose(op, implementation, x, gate, up)]
    return form(x, gate, up, group_sizes, activation)


def choose(op: str, implementation: str | None, x, *weights) -> str:
    """Return what runs for these arguments of `grouped_matmul` or `grouped_glu`.

    Raises:
        ValueError, NotImplementedError: see `pallas_kernels.dispatch.choose_implementation`.
    """
    limits = {
        name: functools.partial(unsupported, x, *weights) for name, unsupported in _LIMITS.items()
    }
    return choose_implementation(op, implementation, limits)


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
        x: rows sorted by group [M, K] of any float type; M may be 0.
        parameters: tree of floating point arrays [E, ...].
        group_sizes: int [E] with a sum of at most M.
        implementation: None, "reference" or "xla".

    Returns:
        output [M, N] in x.dtype; rows past the last group are 0, are not read and get no gradient.

    Raises:
        ValueError: shapes disagree, there are no parameters, or the implementation is unknown.
        TypeError: x or a parameter is not floating point, group_sizes is not integer, or function
            closes over a traced value (of `jit` or `grad`), in any implementation.
        NotImplementedError: the implementation is known but not built.
    """
    advice = "pass a function of (rows, parameters); arrays [E, ...] belong in parameters"
    require_pure("grouped_apply", advice, function=function)
    form = _APPLICATIONS[choose_implementation("grouped_apply", implementation)]
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
    x, parameters = jax.tree.map(jnp.asarray, (x, parameters))
    return form(function, x, parameters, jnp.asarray(group_sizes, jnp.int32))


def _checked(op: str, x, weights: dict, group_sizes):
    """Arguments as jax arrays, shapes and dtypes checked."""
    require_rank(op, "M K", x=x)
    require_rank(op, "E K N", **weights)
    if isinstance(x, MXFP8):
        x.check(f"{op}: x")
    for name, matrices in weights.items():
        if isinstance(matrices, MXFP4):
            matrices.check(op)
        else:
            require_floating(op, **{name: matrices})
            if isinstance(x, MXFP8):
                raise TypeError(f"{op}: x is MXFP8; {name} must be MXFP4, not {matrices.dtype}")
        if matrices.shape[1] != x.shape[1]:
            raise ValueError(
                f"{op}: {name} {matrices.shape} [E, K, N] cannot multiply x {x.shape} [M, K]"
            )
        _check_groups(op, x, matrices.shape[0], group_sizes)
    # Rows may be chosen by traced indices, which numpy arrays do not take.
    x, matrices = jax.tree.map(jnp.asarray, (x, tuple(weights.values())))
    return x, matrices, jnp.asarray(group_sizes, jnp.int32)


def _check_groups(op: str, x, num_groups: int, group_sizes: jax.Array) -> None:
    if not isinstance(x, MXFP8):
        require_floating(op, x=x)
    require_shape(op, (num_groups,), "(one entry per group)", group_sizes=group_sizes)
    require_integer(op, group_sizes=group_sizes)
    if num_groups == 0:
        raise ValueError(f"{op}: there are no groups; at least one is needed")
    num_rows = x.shape[0]

    def summarise(numbers, sizes):
        return numbers.sum(sizes), numbers.min(sizes), sizes

    def problem(total, smallest, sizes) -> str | None:
        if total <= num_rows and smallest >= 0:
            return None
        return (
            f"{op}: group_sizes {sizes.tolist()} sum to {total}; they must not be negative nor sum "
            f"to more than the {num_rows} rows of x"
        )

    check_values(summarise, problem, group_sizes)
