"""Where the tokens of one row lie when mesh axes cut them, and the order that evens causal work.

In order, rank r of R holds the tokens from r T / R on, and the last rank's queries see all keys,
those of the first almost none. Balanced, the row is cut into 2 R chunks, and rank i holds chunks i
and 2 R - 1 - i: together they see as many keys on every rank.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import meshes
from k3jax.errors import UserError
from k3jax.ops.parallel import Parallel
from meshes import TENSOR, axes_of

Axes = tuple[str, ...]


def cutting(entry: str | tuple[str, ...] | None) -> Axes:
    """The mesh axes of an entry of a PartitionSpec that have more than one device."""
    return tuple(axis for axis in axes_of(entry) if meshes.axis_size(axis) > 1)


def num_ranks(axes: Axes) -> int:
    """Devices along `axes`, inside of `meshes.per_device`; 1 where there are none."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def chunks_of(rank: jax.Array | int, ranks: int, layout: str) -> tuple[jax.Array | int, ...]:
    """Which chunks a rank holds, of `ranks` in order or 2 `ranks` balanced."""
    return (rank,) if layout == "contiguous" else (rank, 2 * ranks - 1 - rank)


def token_multiple(entry: str | tuple[str, ...] | None, parallel: Parallel) -> int:
    """What the length of rows whose tokens lie on these mesh axes must be a multiple of.

    The residual stream lies on the tensor axis, too.
    """
    ranks = math.prod(meshes.axis_size(axis) for axis in axes_of(entry))
    is_balanced = parallel.context_layout == "balanced" and ranks > 1
    return ranks * meshes.axis_size(TENSOR) * (2 if is_balanced else 1)


def balance_tokens(x: jax.Array) -> jax.Array:
    """[B, T, ...] in order -> the same in balanced order: every rank sends both its halves once.

    Raises:
        UserError: the tokens of a rank are no two halves.
    """
    spec = meshes.spec_of(x)
    axes = cutting(spec[1])
    if not axes:
        return x
    parts = 2 * math.prod(meshes.axis_size(axis) for axis in axes)
    if x.shape[1] % parts:
        raise UserError(
            f"context_layout='balanced' cuts {x.shape[1]} tokens into {parts} chunks; pad the rows "
            f"to {-(-x.shape[1] // parts) * parts}, or use 'contiguous'"
        )
    spec = P(*spec)
    return meshes.per_device(lambda x: to_balanced(x, axes), (spec,), spec)(x)


def to_balanced(x: jax.Array, axes: Axes) -> jax.Array:
    """`balance_tokens` of this device's tokens [B, T / R, ...], inside of `meshes.per_device`."""
    first, second = jnp.split(x, 2, axis=1)
    even = jax.lax.ppermute(first, axes, _moves(num_ranks(axes), 0))
    odd = jax.lax.ppermute(second, axes, _moves(num_ranks(axes), 1))
    # Rank i holds chunk i first, which is even as i is; the other chunk is not.
    is_odd = jax.lax.axis_index(axes) % 2 == 1
    return jnp.concatenate([jnp.where(is_odd, odd, even), jnp.where(is_odd, even, odd)], axis=1)


def from_balanced(x: jax.Array, axes: Axes) -> jax.Array:
    """The inverse of `to_balanced`."""
    first, second = jnp.split(x, 2, axis=1)
    is_odd = jax.lax.axis_index(axes) % 2 == 1
    even, odd = jnp.where(is_odd, second, first), jnp.where(is_odd, first, second)
    back = [[(to, of) for of, to in _moves(num_ranks(axes), half)] for half in (0, 1)]
    parts = [jax.lax.ppermute(x, axes, moves) for x, moves in zip((even, odd), back)]
    return jnp.concatenate(parts, axis=1)


def _moves(ranks: int, half: int) -> list[tuple[int, int]]:
    """From which rank to which the chunks 2 r + half go."""
    chunks = [2 * rank + half for rank in range(ranks)]
    return [(rank, min(chunk, 2 * ranks - 1 - chunk)) for rank, chunk in enumerate(chunks)]


def whole_tokens(x: jax.Array) -> jax.Array:
    """[B, T, ...] with every row whole: an all-gather over the axes that cut the tokens."""
    batch, _, *rest = meshes.spec_of(x)
    return meshes.reshard(x, P(batch, None, *rest))
