"""The experts' product on rows that lie in the order of their experts, on one device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import meshes
import pallas_kernels
from k3jax.precision import matmul_precision
from pallas_kernels import MXFP4
from pallas_kernels.grouped_matmul import choose

Activation = Callable[[jax.Array, jax.Array], jax.Array]
Pieces = tuple[meshes.Pieces, ...]  # of each array


def expert_product(
    rows: tuple[jax.Array, ...],  # of [M, C]
    sizes: tuple[jax.Array, ...],  # of [G] int32
    exchanges: tuple[Any, ...],
    matrices: tuple[jax.Array | MXFP4, ...],
    pieces: Pieces,
    activation: Activation,
) -> tuple[jax.Array, ...]:
    """down(activation(gate(x), up(x))) of every row with the expert of its group.

    Args:
        rows: rows sorted by group, one array for each chunk of the batch.
        sizes: rows of each group, per chunk; rows past the last group give 0.
        exchanges: per chunk the `meshes.Dispatched` whose groups are this rank's own experts and
            then fetched ones, or None where all groups are own.
        matrices: this device's pieces of gate, up [E, C, F] and down [E, F, C].
        pieces: for each leaf of `matrices`, the axes to gather each dimension over.
        activation: act(gate, up).

    Returns:
        rows [M, C] per chunk, in the type of the rows.
    """
    dtype = rows[0].dtype
    is_packed = any(isinstance(w, MXFP4) for w in matrices)
    matrices = tuple(w if isinstance(w, MXFP4) else w.astype(dtype) for w in matrices)
    has_kernel = choose("grouped_glu", None, rows[0], *matrices[:2]) != "xla"
    if dtype == jnp.float32 and not is_packed and not has_kernel:
        whole = functools.partial(_whole_expert, activation)
        return _apply(whole, pieces, rows, matrices, sizes, exchanges)
    # The release rounds the hidden activation to the model's type.
    split = len(jax.tree.leaves(matrices[:2]))
    gated = functools.partial(_gated, activation)
    hidden = _apply(gated, pieces[:split], rows, matrices[:2], sizes, exchanges)
    return _apply(_down, pieces[split:], hidden, matrices[2:], sizes, exchanges)


def _whole_expert(activation, rows, matrices, sizes):
    """The whole expert at once: no hidden activation is stored."""

    def expert(rows, matrices):
        gate, up, down = matrices
        precision = matmul_precision(rows.dtype)
        hidden = activation(
            jnp.matmul(rows, gate, precision=precision),
            jnp.matmul(rows, up, precision=precision),
        )
        return jnp.matmul(hidden, down, precision=precision)

    return pallas_kernels.grouped_apply(expert, rows, matrices, sizes)


def _gated(activation, rows, matrices, sizes):
    return pallas_kernels.grouped_glu(rows, *matrices, sizes, activation=activation)


def _down(rows, matrices, sizes):
    return pallas_kernels.grouped_matmul(rows, *matrices, sizes)


def _apply(function, pieces: Pieces, rows, matrices, sizes, exchanges):
    """`function` on each chunk with whole matrices, which the backward pass makes again."""
    if any(axes for leaf in pieces for axes in leaf) or any(e is not None for e in exchanges):
        return _apply_gathered(function, pieces, rows, matrices, sizes, exchanges)
    return _apply_to_chunks(function, pieces, rows, matrices, sizes, exchanges)


def _apply_to_chunks(function, pieces, rows, matrices, sizes, exchanges):
    leaves, structure = jax.tree.flatten(matrices)
    whole = [meshes.gather_pieces(leaf, axes) for leaf, axes in zip(leaves, pieces, strict=True)]
    results = []
    for x, groups, exchange in zip(rows, sizes, exchanges, strict=True):
        held = whole if exchange is None else meshes.with_fetched(whole, exchange)
        results.append(function(x, jax.tree.unflatten(structure, held), groups))
    return tuple(results)


# Its residuals are the pieces, whatever the policy of a recomputation around it: gathered and
# fetched matrices live from their collective to the end of their product.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply_gathered(function, pieces, rows, matrices, sizes, exchanges):
    return _apply_to_chunks(function, pieces, rows, matrices, sizes, exchanges)


def _apply_gathered_forward(function, pieces, rows, matrices, sizes, exchanges):
    results = _apply_to_chunks(function, pieces, rows, matrices, sizes, exchanges)
    return results, (rows, matrices, sizes, exchanges)


def _apply_gathered_backward(function, pieces, residuals, dresults):
    rows, matrices, sizes, exchanges = residuals

    def apply(rows, matrices):
        return _apply_to_chunks(function, pieces, rows, matrices, sizes, exchanges)

    drows, dmatrices = jax.vjp(apply, rows, matrices)[1](dresults)
    return drows, dmatrices, None, None


_apply_gathered.defvjp(_apply_gathered_forward, _apply_gathered_backward)
