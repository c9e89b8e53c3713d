"""Projections and table lookups: the only places where an activation meets a weight matrix."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import meshes
from k3jax.precision import matmul_precision
from meshes import TENSOR, axes_of


def dense(equation: str, x: jax.Array, w: jax.Array, *, dtype=None) -> jax.Array:
    """Einsum of an activation with a weight, in the activation's dtype.

    On a mesh the weight is gathered over the axes that only store it. The result's sharding follows
    from the operands: an output letter found in `x` keeps x's axes, a new one takes the weight's.
    Tokens ("t") of the residual stream lie on the tensor axis, too, where they divide: they are
    gathered before a product whose result is cut over tensor, and the sum over tensor of a product
    that contracts what is cut ends as pieces of tokens again.

    Args:
        equation: two-operand einsum, activation first, for example "btd,dhk->bthk".
        x: activation. float32 is multiplied at full precision on every backend.
        w: weight, cast to `x.dtype`.
        dtype: type of the result (and of the accumulation) when it is not `x.dtype`.
    """
    w = w.astype(x.dtype)
    product = functools.partial(
        jnp.einsum,
        equation,
        precision=matmul_precision(x.dtype),
        preferred_element_type=dtype,
    )
    if not meshes.has_mesh():
        return product(x, w)
    x, specs, result, summed, scattered = _arrange(equation, x, w)
    pieces = meshes.pieces_of(w)

    def run(x, w):
        y = product(x, meshes.gather_pieces(w, pieces))
        if scattered is not None:
            return jax.lax.psum_scatter(y, TENSOR, scatter_dimension=scattered, tiled=True)
        return jax.lax.psum(y, summed) if summed else y

    return meshes.per_device(run, specs, result)(x, w)


def _arrange(equation: str, x: jax.Array, w: jax.Array):
    """The activation as the product needs it, and how the product is split.

    Returns:
        x; the specs of x and w; the spec of the result; the axes over which partial products are
        summed; and the dimension of the result into whose pieces they are (None: into whole ones).
    """
    operands, output = equation.split("->")
    x_letters, w_letters = operands.split(",")
    w_axes = dict(zip(w_letters, map(axes_of, meshes.spec_of(w))))
    is_cut = [letter for letter in w_letters if TENSOR in w_axes[letter]]
    if "t" in x_letters and is_cut:
        x = whole_over_tensor(x, x_letters.index("t"))
    x_axes = dict(zip(x_letters, meshes.spec_of(x)))
    used = {axis for letter in output if letter in x_axes for axis in axes_of(x_axes[letter])}
    entries = []
    for letter in output:
        if letter in x_axes:
            entries.append(x_axes[letter])
        else:  # cut as the weight is, or the weight must be whole along it
            keeps = TENSOR in w_axes[letter] and TENSOR not in used
            entries.append(TENSOR if keeps else None)
            if not keeps:
                w_axes[letter] = tuple(a for a in w_axes[letter] if a != TENSOR)
    summed, scattered = (), None
    for letter in x_letters:
        if letter not in output:
            x_axes[letter] = TENSOR if letter in is_cut else None
            summed += (TENSOR,) if letter in is_cut else ()
    if "t" in x_letters and summed:
        place = output.index("t")
        stream = stream_axes(x.shape[x_letters.index("t")], entries[place])
        scattered = place if stream != entries[place] else None
        entries[place] = stream
    specs = (
        PartitionSpec(*(x_axes[letter] for letter in x_letters)),
        PartitionSpec(*(w_axes[letter] or None for letter in w_letters)),
    )
    return x, specs, PartitionSpec(*entries), summed, scattered


def whole_over_tensor(x: jax.Array, dimension: int = 1) -> jax.Array:
    """`x` with one dimension, by default the tokens, gathered over the tensor axis."""
    spec = list(meshes.spec_of(x))
    axes = axes_of(spec[dimension])
    if TENSOR not in axes:
        return x
    spec[dimension] = tuple(axis for axis in axes if axis != TENSOR) or None
    return meshes.reshard(x, PartitionSpec(*spec))


def stream_axes(length: int, axes: str | tuple[str, ...] | None):
    """Mesh axes of the residual stream's tokens: `axes`, and tensor where so many tokens divide."""
    own, tensor = axes_of(axes), meshes.axis_size(TENSOR)
    parts = math.prod(meshes.axis_size(axis) for axis in own) * tensor
    if tensor == 1 or TENSOR in own or length % parts:
        return axes
    return (*own, TENSOR)


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of `table` [W, D] for `tokens` [B, T] int32; an id outside 0..W-1 gives NaN.

    NaN instead of the clipped row of a plain gather: a wrong id must show in the logits. A table
    that is cut over the vocabulary is read in pieces, whose rows are summed.
    """
    num_rows, pieces = table.shape[0], meshes.pieces_of(table)
    stored = meshes.spec_of(table)
    is_cut = TENSOR in axes_of(stored[0])
    if is_cut:  # a token's row is a sum over tensor: all devices along it need the same tokens
        tokens = whole_over_tensor(tokens)
    batch, tokens_axes = meshes.spec_of(tokens)
    stream = stream_axes(tokens.shape[1], tokens_axes) if is_cut else tokens_axes

    def run(table, tokens):
        table = meshes.gather_pieces(table, pieces)
        first = jax.lax.axis_index(TENSOR) * table.shape[0] if is_cut else 0
        row = tokens - first
        here = (row >= 0) & (row < table.shape[0])
        rows = table.at[jnp.where(here, row, 0)].get(mode="promise_in_bounds")
        if not is_cut:
            return jnp.where(here[..., None], rows, jnp.asarray(jnp.nan, rows.dtype))
        rows = jnp.where(here[..., None], rows, 0)
        if stream == tokens_axes:
            rows = jax.lax.psum(rows, TENSOR)
        else:
            rows = jax.lax.psum_scatter(rows, TENSOR, scatter_dimension=1, tiled=True)
            size = rows.shape[1]
            own = jax.lax.axis_index(TENSOR) * size
            tokens = jax.lax.dynamic_slice_in_dim(tokens, own, size, 1)
        inside = (tokens >= 0) & (tokens < num_rows)
        return jnp.where(inside[..., None], rows, jnp.asarray(jnp.nan, rows.dtype))

    specs = (stored, PartitionSpec(batch, tokens_axes))
    return meshes.per_device(run, specs, PartitionSpec(batch, stream, None))(table, tokens)
