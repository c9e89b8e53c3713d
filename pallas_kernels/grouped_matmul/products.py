"""Row groups times arrays of matrices in XLA: one group after the other, tile by tile of its rows.

A matrix is fetched once for all its rows, and the sum of its gradient stays in the cache until it
is written. bfloat16 is multiplied natively and accumulated in float32. Tiles run in the order of
rows and may reach into the next group, whose own tiles overwrite what they wrote there.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import align_varying
from pallas_kernels.grouped_matmul.bits import from_bits, to_bits
from pallas_kernels.grouped_matmul.row_tiles import TILES


def array_matmul(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """See `pallas_kernels.grouped_matmul`; x and weights of one dtype."""
    x, weights, group_sizes = align_varying(x, weights, group_sizes)
    if x.shape[0] == 0:
        return jnp.zeros_like(x, shape=(0, weights.shape[2]))
    return _product(x, weights, group_sizes)


@jax.custom_vjp
def _product(x, weights, group_sizes):
    num_rows, dtype = x.shape[0], x.dtype
    rows = _Rows(group_sizes, num_rows)
    extended, stored = rows.extend(x), to_bits(weights)

    def of_group(group, output):
        matrix = from_bits(stored[group], dtype)

        def of_tile(row, output):
            product = _dot(rows.tile(extended, row, group, dtype), matrix, (1, 0))
            return rows.store(output, product.astype(dtype), row)

        return rows.for_tiles(group, of_tile, output)

    output = rows.extend(jnp.zeros_like(x, shape=(num_rows, weights.shape[2])))
    output = rows.for_groups(of_group, output)
    # The last tile may reach past the last group: zero times a matrix, which may hold NaN.
    is_used = jnp.arange(num_rows)[:, None] < rows.ends[-1]
    return jnp.where(is_used, from_bits(output, dtype)[:num_rows], 0)


def _product_forward(x, weights, group_sizes):
    return _product(x, weights, group_sizes), (x, weights, group_sizes)


def _product_backward(operands, d_output):
    x, weights, group_sizes = operands
    num_rows, dtype = x.shape[0], x.dtype
    rows = _Rows(group_sizes, num_rows)
    extended, d_extended, stored = rows.extend(x), rows.extend(d_output), to_bits(weights)

    def of_group(group, carry):
        d_x, d_weights = carry
        matrix = from_bits(stored[group], dtype)

        def of_tile(row, carry):
            d_x, total = carry
            tile = rows.tile(extended, row, group, dtype)
            d_tile = rows.tile(d_extended, row, group, dtype)
            d_x = rows.store(d_x, _dot(d_tile, matrix, (1, 1)).astype(dtype), row)
            return d_x, total + _dot(tile, d_tile, (0, 0))

        total = jnp.zeros_like(matrix, dtype=jnp.promote_types(dtype, jnp.float32))
        d_x, total = rows.for_tiles(group, of_tile, (d_x, total))
        own = to_bits(total.astype(dtype))
        return d_x, lax.dynamic_update_index_in_dim(d_weights, own, group, 0)

    carry = jnp.zeros_like(extended), jnp.zeros_like(stored)
    d_x, d_weights = rows.for_groups(of_group, carry)
    is_used = jnp.arange(num_rows)[:, None] < rows.ends[-1]
    d_x = jnp.where(is_used, from_bits(d_x, dtype)[:num_rows], 0)
    return d_x, from_bits(d_weights, dtype), None


_product.defvjp(_product_forward, _product_backward)


class _Rows:
    """Where the rows of each group are, and loops over groups and their tiles."""

    def __init__(self, group_sizes: jax.Array, num_rows: int):
        num_groups = group_sizes.shape[0]
        self.tile_rows = TILES.rows(num_rows, num_groups)
        self.sizes, self.ends = group_sizes, jnp.cumsum(group_sizes)
        (self.chosen,) = jnp.nonzero(group_sizes > 0, size=num_groups)

    def extend(self, array: jax.Array) -> jax.Array:
        """Bits of an array with rows for the last tile to reach into."""
        return to_bits(jnp.pad(array, ((0, self.tile_rows), (0, 0))))

    def tile(self, extended: jax.Array, row, group, dtype) -> jax.Array:
        """The rows from `row` on; 0 past the group, where there may be NaN."""
        belongs = row + jnp.arange(self.tile_rows) < self.ends[group]
        rows = lax.dynamic_slice_in_dim(extended, row, self.tile_rows)
        return from_bits(jnp.where(belongs[:, None], rows, 0), dtype)

    def store(self, extended: jax.Array, rows: jax.Array, row) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(extended, to_bits(rows), row, 0)

    def for_groups(self, body: Callable, carry):
        """Body(group, carry) -> carry for each group that holds rows."""
        count = jnp.sum(self.sizes > 0)
        return lax.fori_loop(0, count, lambda n, carry: body(self.chosen[n], carry), carry)

    def for_tiles(self, group, body: Callable, carry):
        """Body(first row, carry) -> carry for each tile of a group."""
        start, count = self.ends[group] - self.sizes[group], -(-self.sizes[group] // self.tile_rows)
        return lax.fori_loop(
            0, count, lambda n, carry: body(start + n * self.tile_rows, carry), carry
        )


def _dot(a: jax.Array, b: jax.Array, dimensions: tuple[int, int]) -> jax.Array:
    """Product over one dimension of each; float32 operands are not rounded on any device."""
    return lax.dot_general(
        a,
        b,
        (((dimensions[0],), (dimensions[1],)), ((), ())),
        precision=None if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
    )
