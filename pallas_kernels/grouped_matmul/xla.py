"""Row groups as a loop over tiles of rows, each with the parameters of one group.

`lax.ragged_dot` on CPU multiplies every row with every matrix. Here tile i holds `rows` rows
from the beginning of its group on. The last tile of a group reaches into the rows of the next
group; tiles run in the order of rows, so the next tile simply overwrites what it wrote there,
and nothing is gathered, padded or scattered. The number of tiles is dynamic (a while loop), at
most M / rows + E.

The loop body is any function of (tile, parameters of the group): the plain product, or a whole
expert MLP, whose hidden activations then never leave the cache. The backward pass stores the
operands and evaluates the function again, tile by tile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import align_varying
from pallas_kernels.grouped_matmul.bits import from_bits, to_bits
from pallas_kernels.grouped_matmul.packed import packed_matmul
from pallas_kernels.grouped_matmul.products import array_matmul
from pallas_kernels.grouped_matmul.row_tiles import TILES
from pallas_kernels.mxfp4 import MXFP4
from pallas_kernels.mxfp8 import MXFP8


def grouped_matmul(
    x: jax.Array | MXFP8, weights: jax.Array | MXFP4, group_sizes: jax.Array
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul`."""
    if isinstance(x, MXFP8):
        x = x.dequantize(jnp.bfloat16)
    if isinstance(weights, MXFP4):
        return packed_matmul(x, weights, group_sizes)
    if x.dtype != weights.dtype:
        return grouped_apply(_product, x, weights, group_sizes)
    return array_matmul(x, weights, group_sizes)


def grouped_glu(x, gate, up, group_sizes, activation) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_glu`."""
    if isinstance(gate, MXFP4) or x.dtype == jnp.bfloat16:
        a, b = (grouped_matmul(x, weights, group_sizes) for weights in (gate, up))
        return activation(a.astype(_precise(a)), b.astype(_precise(b))).astype(a.dtype)

    def gated(tile, own):
        return activation(_product(tile, own[0]), _product(tile, own[1]))

    return grouped_apply(gated, x, (gate, up), group_sizes)


def _product(tile: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.matmul(tile, matrix, precision=jax.lax.Precision.HIGHEST)


def grouped_apply(
    function: Callable[[jax.Array, Any], jax.Array],
    x: jax.Array,
    parameters: Any,
    group_sizes: jax.Array,
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_apply`."""
    leaves, structure = jax.tree.flatten(parameters)
    x, group_sizes, *leaves = align_varying(x, group_sizes, *leaves)
    if x.shape[0] == 0:
        tile = jnp.zeros_like(x, shape=(1, *x.shape[1:]), dtype=_precise(x))
        first = jax.tree.unflatten(structure, [leaf[0].astype(_precise(x)) for leaf in leaves])
        return function(tile, first)[:0].astype(x.dtype)
    return _apply(function, x, jax.tree.unflatten(structure, leaves), group_sizes)


def _precise(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Tiles in the order of their rows; entries past `num_tiles` mean nothing."""

    groups: jax.Array  # group of each tile
    starts: jax.Array  # first row of each tile
    ends: jax.Array  # row after the last one of the tile's group
    num_tiles: jax.Array


def _plan(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> _Plan:
    num_groups = group_sizes.shape[0]
    group_ends = jnp.cumsum(group_sizes)
    tiles_per_group = (group_sizes + tile_rows - 1) // tile_rows
    tile_ends = jnp.cumsum(tiles_per_group)
    tiles = jnp.arange(num_rows // tile_rows + num_groups)
    groups = jnp.minimum(jnp.searchsorted(tile_ends, tiles, side="right"), num_groups - 1)
    rank = tiles - (tile_ends - tiles_per_group)[groups]  # of the tile within its group
    starts = (group_ends - group_sizes)[groups] + rank * tile_rows
    return _Plan(groups, starts, group_ends[groups], tile_ends[-1])


def _extend(x: jax.Array, tile_rows: int) -> jax.Array:
    """Bits of x with rows for the last tile to reach into."""
    return to_bits(jnp.pad(x, ((0, tile_rows), (0, 0))))


def _tile(x: jax.Array, plan: _Plan, index: jax.Array, tile_rows: int, dtype) -> jax.Array:
    """Return tile `index` [tile_rows, ...]; rows past its group, which may hold NaN, are 0."""
    start = plan.starts[index]
    belongs = start + jnp.arange(tile_rows) < plan.ends[index]
    rows = jnp.where(belongs[:, None], lax.dynamic_slice_in_dim(x, start, tile_rows), 0)
    return from_bits(rows, dtype).astype(jnp.promote_types(dtype, jnp.float32))


def _of_group(parameters: Any, group: jax.Array, dtype) -> Any:
    def entry(leaf):
        own = lax.dynamic_index_in_dim(to_bits(leaf), group, keepdims=False)
        return from_bits(own, leaf.dtype).astype(dtype)

    return jax.tree.map(entry, parameters)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(function, x, parameters, group_sizes):
    precise = _precise(x)
    num_rows = x.shape[0]
    tile_rows = TILES.rows(num_rows, group_sizes.shape[0])
    plan = _plan(group_sizes, num_rows, tile_rows)
    extended = _extend(x, tile_rows)

    def result_of(index):
        tile = _tile(extended, plan, index, tile_rows, x.dtype)
        result = function(tile, _of_group(parameters, plan.groups[index], precise))
        belongs = plan.starts[index] + jnp.arange(tile_rows) < plan.ends[index]
        return jnp.where(belongs[:, None], result, 0).astype(x.dtype)

    def step(index, output):
        own = to_bits(result_of(index))
        return lax.dynamic_update_slice_in_dim(output, own, plan.starts[index], 0)

    width = jax.eval_shape(result_of, 0).shape[1]
    output = to_bits(jnp.zeros_like(x, shape=(num_rows + tile_rows, width)))
    return from_bits(lax.fori_loop(0, plan.num_tiles, step, output), x.dtype)[:num_rows]


def _apply_forward(function, x, parameters, group_sizes):
    return _apply(function, x, parameters, group_sizes), (x, parameters, group_sizes)


def _apply_backward(function, operands, d_output):
    x, parameters, group_sizes = operands
    precise = _precise(x)
    num_rows = x.shape[0]
    tile_rows = TILES.rows(num_rows, group_sizes.shape[0])
    plan = _plan(group_sizes, num_rows, tile_rows)
    extended, d_extended = _extend(x, tile_rows), _extend(d_output, tile_rows)

    def step(index, carry):
        d_x, d_parameters = carry
        group = plan.groups[index]
        tile = _tile(extended, plan, index, tile_rows, x.dtype)
        d_tile = _tile(d_extended, plan, index, tile_rows, x.dtype)
        _, transpose = jax.vjp(function, tile, _of_group(parameters, group, precise))
        d_rows, d_own = transpose(d_tile)
        d_rows = to_bits(d_rows.astype(x.dtype))
        d_x = lax.dynamic_update_slice_in_dim(d_x, d_rows, plan.starts[index], 0)

        def accumulate(total, part):
            part += lax.dynamic_index_in_dim(total, group, keepdims=False)
            return lax.dynamic_update_index_in_dim(total, part, group, 0)

        return d_x, jax.tree.map(accumulate, d_parameters, d_own)

    carry = (
        jnp.zeros_like(extended),
        jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=precise), parameters),
    )
    d_x, d_parameters = lax.fori_loop(0, plan.num_tiles, step, carry)
    d_parameters = jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), d_parameters, parameters)
    return from_bits(d_x, x.dtype)[:num_rows], d_parameters, None


_apply.defvjp(_apply_forward, _apply_backward)
