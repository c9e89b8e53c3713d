"""Which rows meet which matrix, step by step: tables that the kernels' grids read in advance.

Rows are cut into tiles of equal size, whatever the groups. A visit is a pair of a tile and a group
that share rows; visits run in the order of the rows, so that a tile is read once, a matrix is read
once, and a tile's results are in fast memory until its last group has filled in its rows. There
are at most (number of tiles) + (number of groups that hold rows) visits; the grid has that many
steps, and steps past the last visit do nothing. All is computed on the device.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """Tables of the steps [V] int32; past the last visit they repeat it.

    Attributes:
        groups: whose matrix is used.
        sources: tile of the operands.
        targets: tile of the results.
        begins: first row of the group within the tile, counted from the tile's first.
        ends: row after the last one.
        counts: [2], the number of visits of groups, and with those of rows that belong to none.
    """

    groups: jax.Array
    sources: jax.Array
    targets: jax.Array
    begins: jax.Array
    ends: jax.Array
    counts: jax.Array

    def __iter__(self):
        return (getattr(self, field.name) for field in dataclasses.fields(self))


def num_steps(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """Steps of the grid over `row_visits`: the most visits there can be."""
    return -(-num_rows // tile_rows) + min(num_groups, num_rows)


def row_visits(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> Visits:
    """Visits of the groups that hold rows, then of the tiles with rows past the last group.

    In the latter `begins` is the first row to be zeroed; they use nothing of their operands, so
    that the tables repeat the last group and tile there and nothing is read.
    """
    num_groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    rest = num_rows - ends[-1]
    # The rows that belong to no group are one more group.
    sizes = jnp.append(group_sizes, rest)
    ends = jnp.append(ends, num_rows)
    steps = jnp.arange(num_steps(num_rows, num_groups, tile_rows))
    groups, tiles, begins, own_ends, cumulated = _enumerate(
        sizes, ends, steps, tile_rows, jnp.int32(0)
    )
    is_product = steps < cumulated[-2]
    last = jnp.maximum(cumulated[-2] - 1, 0)
    keep = lambda table: jnp.where(is_product, table, table[last])  # noqa: E731
    return Visits(
        jnp.minimum(keep(groups), num_groups - 1),
        keep(tiles),
        tiles,
        begins,
        own_ends,
        cumulated[-2:],
    )


def matrix_visits(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> Visits:
    """Visits of all groups, one for an empty group, whose matrix is then zero."""
    num_groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    steps = jnp.arange(-(-num_rows // tile_rows) + num_groups)
    groups, tiles, begins, own_ends, cumulated = _enumerate(
        group_sizes, ends, steps, tile_rows, jnp.int32(1)
    )
    # An empty group past the rows has no tile of its own.
    tiles = jnp.minimum(tiles, -(-num_rows // tile_rows) - 1)
    return Visits(groups, tiles, tiles, begins, own_ends, jnp.stack([cumulated[-1]] * 2))


def _enumerate(sizes, ends, steps, tile_rows: int, visits_of_empty):
    """Group, tile, rows within the tile of each step, and the visits up to each group."""
    starts = ends - sizes
    first = starts // tile_rows
    visits = jnp.where(sizes > 0, (ends - 1) // tile_rows - first + 1, visits_of_empty)
    cumulated = jnp.cumsum(visits)
    steps = jnp.minimum(steps, cumulated[-1] - 1)
    # At most a thousand groups: comparing all is one small fusion, a binary search a loop.
    groups = jnp.sum(cumulated[None, :] <= steps[:, None], axis=1, dtype=jnp.int32)
    tiles = first[groups] + steps - (cumulated - visits)[groups]
    origin = tiles * tile_rows
    begins = jnp.maximum(starts[groups] - origin, 0)
    own_ends = jnp.minimum(ends[groups] - origin, tile_rows)
    return groups, tiles, begins, own_ends, cumulated
