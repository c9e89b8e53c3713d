"""Projections and table lookups: the only places where an activation meets a weight matrix."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import meshes
from k3jax.precision import matmul_precision


def dense(equation: str, x: jax.Array, w: jax.Array, *, dtype=None) -> jax.Array:
    """Einsum of an activation with a weight, in the activation's dtype.

    The result's sharding follows from the operands: an output letter found in `x` keeps x's axes,
    a new one takes the weight's axes that are not already used.

    Args:
        equation: two-operand einsum, activation first, for example "btd,dhk->bthk".
        x: activation. float32 is multiplied at full precision on every backend.
        w: weight, cast to `x.dtype`.
        dtype: type of the result (and of the accumulation) when it is not `x.dtype`.
    """
    sharding = _output_spec(equation, x, w) if meshes.has_mesh() else None
    return jnp.einsum(
        equation,
        x,
        w.astype(x.dtype),
        precision=matmul_precision(x.dtype),
        preferred_element_type=dtype,
        out_sharding=sharding,
    )


def _output_spec(equation: str, x: jax.Array, w: jax.Array) -> PartitionSpec:
    operands, output = equation.split("->")
    x_letters, w_letters = operands.split(",")
    x_axes = dict(zip(x_letters, meshes.spec_of(x)))
    w_axes = dict(zip(w_letters, meshes.spec_of(w)))
    used = {axis for letter in output if letter in x_axes for axis in axes_of(x_axes[letter])}
    entries = []
    for letter in output:
        if letter in x_axes:
            entries.append(x_axes[letter])
        else:
            free = tuple(axis for axis in axes_of(w_axes[letter]) if axis not in used)
            used.update(free)
            entries.append(free or None)
    return PartitionSpec(*entries)


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of `table` [W, D] for `tokens` [B, T] int32; an id outside 0..W-1 gives NaN.

    NaN instead of the clipped row of a plain gather: a wrong id must show in the logits.
    """
    inside = (tokens >= 0) & (tokens < table.shape[0])
    sharding = None
    if meshes.has_mesh():
        sharding = PartitionSpec(*meshes.spec_of(tokens), None)
    rows = table.at[jnp.where(inside, tokens, 0)].get(
        out_sharding=sharding, mode="promise_in_bounds"
    )
    return jnp.where(inside[..., None], rows, jnp.asarray(jnp.nan, rows.dtype))
