"""Tokens at the door of a call: spread over the mesh in force, and padded where it asks for it."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import meshes
from k3jax import ops
from k3jax.errors import UserError


class Spread(NamedTuple):
    """Rows as the model computes them; without a mesh as they were given."""

    tokens: jax.Array  # [B, T] and what was added to the right
    segment_ids: jax.Array | None  # likewise; never None where something was added
    length: int  # T

    def alike(self, x: jax.Array) -> jax.Array:
        """Another [B, T] padded with zeros, whole rows on the devices that hold the tokens'."""
        x = jnp.pad(
            ops.whole_tokens(jnp.asarray(x)), ((0, 0), (0, self.tokens.shape[1] - x.shape[1]))
        )
        return meshes.reshard(x, P(meshes.spec_of(self.tokens)[0], None))


def spread_rows(
    tokens: jax.Array,
    segment_ids: jax.Array | None,
    *,
    parallel: ops.Parallel = ops.DEFAULT_PARALLEL,
    pad_id: int = 0,
) -> Spread:
    """Rows over the batch axes and tokens over the context axis, as far as they are not yet.

    Lengths are padded with segment 0 to a multiple of the devices that cut the tokens: context
    times tensor, twice as many for `parallel.context_layout="balanced"`.

    Args:
        tokens: [B, T] int32.
        segment_ids: [B, T] integers or None.
        parallel: how the work is spread.
        pad_id: token to pad with.

    Raises:
        UserError: rows that do not divide by the devices of the batch axes.
    """
    tokens, length = jnp.asarray(tokens), jnp.shape(tokens)[1]
    if not meshes.has_mesh():
        return Spread(tokens, segment_ids, length)
    # The model cuts tokens over tensor itself, where it wants them so.
    tokens = ops.whole_over_tensor(tokens)
    batch, cut = meshes.spec_of(tokens)
    rules = meshes.AxisRules()
    for entry, name in ((batch, "batch"), (cut, "tokens")):
        known = meshes.axes_of(rules.spec((name,))[0])
        if wrong := set(meshes.axes_of(entry)) - set(known):
            raise UserError(
                f"the {name} dimension of the tokens lies on {sorted(wrong)}; it may lie on {known}"
            )
    if not _parts(batch):
        batch = _row_axes(tokens.shape[0], rules.spec(("batch",))[0])
    (wanted,) = rules.spec(("tokens",))
    cut = cut if _parts(cut) else wanted
    multiple = ops.token_multiple(cut, parallel)
    extra = -length % multiple
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    if extra:
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        padding = ((0, 0), (0, extra))
        tokens = jnp.pad(ops.whole_tokens(tokens), padding, constant_values=pad_id)
        segment_ids = jnp.pad(ops.whole_tokens(segment_ids), padding)
    row = P(batch, cut)
    if segment_ids is not None:
        segment_ids = meshes.reshard(segment_ids, row)
    return Spread(meshes.reshard(tokens, row), segment_ids, length)


def cut_back(x: jax.Array, length: int) -> jax.Array:
    """[B, T + padding, ...] -> [B, T, ...]; rows are whole where padding goes."""
    return x if x.shape[1] == length else ops.whole_tokens(x)[:, :length]


def _parts(entry) -> int:
    """Mesh axes of one entry that have more than one device."""
    return sum(meshes.axis_size(axis) > 1 for axis in meshes.axes_of(entry))


def _row_axes(num_rows: int, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The batch axes, or all but the last (that of the experts), which few rows may do without."""
    sizes = [meshes.axis_size(axis) for axis in axes]
    for kept in (len(axes), len(axes) - 1):
        if num_rows % math.prod(sizes[:kept]) == 0:
            return axes[:kept]
    named = " x ".join(f"{axis} {size}" for axis, size in zip(axes, sizes) if size > 1)
    needed, least = math.prod(sizes), math.prod(sizes[:-1])
    raise UserError(
        f"{num_rows} rows do not divide by the devices of the batch axes ({named}); give a "
        f"multiple of {needed} rows"
        + (f" (or of {least}, which leaves the expert axis out)" if least < needed else "")
        + f", or a mesh whose batch axes multiply to a divisor of {num_rows}"
    )
