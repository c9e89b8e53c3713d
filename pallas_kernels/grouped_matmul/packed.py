"""Row groups times MXFP4 matrices: each matrix is decoded block by block, once for all its rows.

Groups of a row or two decode the weights inside the product with the row; nothing decoded is
written to memory. Otherwise a block of a matrix is decoded into a buffer, which all tiles of the
group's rows then use; no more than one block exists in decoded form. Even and odd input columns,
the halves of the bytes, are two products, so that nothing is interleaved.

Tiles run in the order of rows and may reach into the next group, whose own tiles overwrite what
they wrote there.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import align_varying
from pallas_kernels.grouped_matmul.bits import from_bits, to_bits
from pallas_kernels.mxfp4 import GROUP, MXFP4
from pallas_kernels.mxfp4.xla import decode_columns, stream_columns, stream_scales

BYTES = GROUP // 2  # codes of one group


@dataclasses.dataclass(frozen=True)
class PackedTiles:
    """Sizes of tiles and blocks: caches bound them above, the start-up of a product below.

    Attributes:
        alone: groups of at most this many rows are multiplied row by row.
        alone_below: mean group size from which on such groups are too rare to look for.
        alone_bytes: codes of a block of the product with one row, which reads them twice.
        smallest, largest: rows of a tile, which is about the mean group size.
        largest_single: rows of a tile where there is one group, and no tile is partly filled.
        few_rows: tiles of at most this many rows have blocks of `few_weights`, others `weights`.
    """

    alone: int
    alone_below: int
    alone_bytes: int
    smallest: int
    largest: int
    largest_single: int
    few_rows: int
    few_weights: int
    weights: int

    def rows(self, num_rows: int, num_groups: int) -> int:
        """Return the power of two at or above the mean group size, within the bounds."""
        if num_groups == 1:
            return _Blocks.of(num_rows, self.largest_single).width
        mean = -(-num_rows // num_groups)
        return min(max(1 << (mean - 1).bit_length(), self.smallest), self.largest)

    def block_weights(self, tile_rows: int) -> int:
        """Return how many weights are decoded at once."""
        return self.few_weights if tile_rows <= self.few_rows else self.weights


TILES = PackedTiles(
    alone=2,
    alone_below=8,
    alone_bytes=3 << 20,
    smallest=16,
    largest=512,
    largest_single=1024,
    few_rows=128,
    few_weights=3 << 20,
    weights=6 << 20,
)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Equal blocks of a dimension; the last one overlaps the one before if they do not fit."""

    total: int
    width: int

    @classmethod
    def of(cls, total: int, limit: int, multiple: int = 1) -> "_Blocks":
        """Blocks of at most `limit` (or `multiple`) entries, a multiple of `multiple`."""
        number = -(-total // max(limit, multiple))
        return cls(total, -(-total // (number * multiple)) * multiple)

    @property
    def number(self) -> int:
        return -(-self.total // self.width)

    def start(self, index: jax.Array) -> jax.Array:
        return jnp.minimum(index * self.width, self.total - self.width)


def packed_matmul(x: jax.Array, weights: MXFP4, group_sizes: jax.Array) -> jax.Array:
    """See `pallas_kernels.grouped_matmul`."""
    x, codes, scales, group_sizes = align_varying(x, weights.codes, weights.scales, group_sizes)
    if x.shape[0] == 0:
        return jnp.zeros_like(x, shape=(0, weights.shape[2]))
    return _product(x, MXFP4(codes, scales), group_sizes)


@jax.custom_vjp
def _product(x, weights, group_sizes):
    num_rows = x.shape[0]
    num_groups, num_columns, half = weights.codes.shape
    columns_of_x = (x[:, 0::2], x[:, 1::2])
    output = jnp.zeros_like(x, shape=(num_rows, num_columns))
    # Row by row the sums are float32.
    in_tiles = num_rows >= TILES.alone_below * num_groups or x.dtype == jnp.float64
    alone = 0 if in_tiles else TILES.alone
    if num_rows > alone:
        tile_rows = TILES.rows(num_rows, num_groups)
        limit = TILES.block_weights(tile_rows) // (2 * half)

        def decode(group, start, width):
            own = _rows_of(weights, group, start, width)
            return decode_columns(*own, _operand_type(x))

        def multiply(block, x_even, x_odd):
            even, odd = block
            return (_dot(x_even, even, contract=1) + _dot(x_odd, odd, contract=1),)

        (output,) = _by_tiles(
            decode,
            multiply,
            columns_of_x,
            (output,),
            group_sizes,
            tile_rows=tile_rows,
            more_than=alone,
            blocks=_Blocks.of(num_columns, limit),
        )
    if alone:
        output = _row_by_row(columns_of_x, weights, group_sizes, output)
    return output


def _product_forward(x, weights, group_sizes):
    return _product(x, weights, group_sizes), (weights, group_sizes)


def _product_backward(operands, d_output):
    """d_x = d_output @ weights^T, in blocks of input columns."""
    weights, group_sizes = operands
    num_rows = d_output.shape[0]
    num_groups, num_columns, half = weights.codes.shape
    tile_rows = TILES.rows(num_rows, num_groups)
    limit = TILES.block_weights(tile_rows) // (2 * num_columns)

    def decode(group, start, width):
        own = _columns_of(weights, group, start, width)
        return decode_columns(*own, _operand_type(d_output))

    def multiply(block, d_rows):
        return tuple(_dot(d_rows, columns, contract=0) for columns in block)

    d_columns = jnp.zeros_like(d_output, shape=(num_rows, half))
    d_columns = _by_tiles(
        decode,
        multiply,
        (d_output,),
        (d_columns, d_columns),
        group_sizes,
        tile_rows=tile_rows,
        more_than=0,
        blocks=_Blocks.of(half, limit, BYTES),
    )
    return jnp.stack(d_columns, axis=-1).reshape(num_rows, 2 * half), None, None


_product.defvjp(_product_forward, _product_backward)


def _by_tiles(
    decode: Callable,
    multiply: Callable,
    operands: tuple[jax.Array, ...],
    outputs: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    *,
    tile_rows: int,
    more_than: int,
    blocks: _Blocks,
) -> tuple[jax.Array, ...]:
    """Products of all groups with more than `more_than` rows.

    Args:
        decode: (group, first column, number of columns) -> a block of the group's matrix.
        multiply: (block, tile of each operand) -> columns of the tile of each output, float32.
        operands: arrays [M, ...] of rows.
        outputs: arrays [M, columns]; zero where no group writes.
        group_sizes: int32 [E].
        tile_rows: rows of a tile.
        more_than: smaller groups are left out.
        blocks: how the columns of the outputs are cut.
    """
    num_rows = operands[0].shape[0]
    # The last tile may reach past the rows; with one group it starts at a multiple of a tile.
    spare = -num_rows % tile_rows if group_sizes.shape[0] == 1 else tile_rows
    extend = lambda a: to_bits(jnp.pad(a, ((0, spare), (0, 0))) if spare else a)  # noqa: E731
    dtypes = [a.dtype for a in operands], [a.dtype for a in outputs]
    operands, outputs = jax.tree.map(extend, (operands, outputs))
    starts = jnp.cumsum(group_sizes) - group_sizes
    is_chosen = group_sizes > more_than
    (chosen,) = jnp.nonzero(is_chosen, size=group_sizes.shape[0])

    def of_group(index, outputs):
        group = chosen[index]
        end = starts[group] + group_sizes[group]

        def of_block(number, outputs):
            column = blocks.start(number)
            block = decode(group, column, blocks.width)

            def of_tile(tile, outputs):
                row = starts[group] + tile * tile_rows
                rows = [
                    from_bits(lax.dynamic_slice_in_dim(a, row, tile_rows), dtype)
                    for a, dtype in zip(operands, dtypes[0], strict=True)
                ]
                belongs = row + jnp.arange(tile_rows) < end
                return tuple(
                    lax.dynamic_update_slice(
                        output,
                        to_bits(jnp.where(belongs[:, None], own, 0).astype(dtype)),
                        _at(row, column),
                    )
                    for output, dtype, own in zip(
                        outputs, dtypes[1], multiply(block, *rows), strict=True
                    )
                )

            num_tiles = (group_sizes[group] + tile_rows - 1) // tile_rows
            return lax.fori_loop(0, num_tiles, of_tile, outputs)

        return lax.fori_loop(0, blocks.number, of_block, outputs)

    outputs = lax.fori_loop(0, is_chosen.sum(), of_group, outputs)
    return tuple(
        from_bits(output, dtype)[:num_rows]
        for output, dtype in zip(outputs, dtypes[1], strict=True)
    )


def _row_by_row(columns_of_x, weights: MXFP4, group_sizes: jax.Array, output: jax.Array):
    """Fill in the rows of groups of at most `TILES.alone` rows."""
    num_rows = output.shape[0]
    num_groups, num_columns, half = weights.codes.shape
    # At least two blocks: XLA would move the decoding of a single one out of its loop.
    blocks = _Blocks.of(num_columns, min(TILES.alone_bytes // half, (num_columns + 1) // 2))
    row_numbers = jnp.arange(num_rows)
    ends = jnp.cumsum(group_sizes)
    group_of_row = jnp.searchsorted(ends, row_numbers, side="right")
    group_of_row = jnp.minimum(group_of_row, num_groups - 1)
    is_alone = (row_numbers < ends[-1]) & (group_sizes[group_of_row] <= TILES.alone)
    (chosen,) = jnp.nonzero(is_alone, size=num_rows)
    columns_of_x = [columns.astype(jnp.float32) for columns in columns_of_x]

    def of_row(index, sums):
        row = chosen[index]
        group = group_of_row[row]
        factors, factors_of_sums = stream_scales(weights.scales[group])

        def of_block(number, sums):
            column = blocks.start(number)
            codes = lax.dynamic_slice(weights.codes, _at(group, column, 0), (1, blocks.width, half))
            own = lax.dynamic_slice_in_dim(factors, column, blocks.width)
            # XLA on CPU fuses the decoding into a product only in this spelling: a vector before
            # a transposed matrix, and nothing added to the result. Hence two sums.
            parts = [
                jnp.matmul(x[row], columns.T, precision=lax.Precision.HIGHEST)
                for x, columns in zip(columns_of_x, stream_columns(codes[0], own), strict=True)
            ]
            return tuple(
                lax.dynamic_update_slice(total, part[None], _at(row, column))
                for total, part in zip(sums, parts, strict=True)
            )

        even, odd, factor = lax.fori_loop(0, blocks.number, of_block, sums[:2]) + sums[2:]
        factor = lax.dynamic_update_slice(factor, factors_of_sums[None], _at(row, 0))
        return even, odd, factor

    zeros = jnp.zeros_like(columns_of_x[0], shape=output.shape)
    even, odd, factor = lax.fori_loop(0, is_alone.sum(), of_row, (zeros, zeros, zeros))
    result = ((even + odd) * factor).astype(output.dtype)
    return jnp.where(is_alone[:, None], result, output)


def _rows_of(weights: MXFP4, group, start, width: int) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of `width` output columns of one matrix."""
    codes, scales = weights.codes, weights.scales
    return tuple(
        lax.dynamic_slice(a, _at(group, start, 0), (1, width, a.shape[2]))[0]
        for a in (codes, scales)
    )


def _columns_of(weights: MXFP4, group, start, width: int) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of `width` bytes of every output column of one matrix."""
    num_columns = weights.codes.shape[1]
    codes = lax.dynamic_slice(weights.codes, _at(group, 0, start), (1, num_columns, width))
    scales = lax.dynamic_slice(
        weights.scales, _at(group, 0, start // BYTES), (1, num_columns, width // BYTES)
    )
    return codes[0], scales[0]


def _at(*starts) -> tuple[jax.Array, ...]:
    """Starts of a slice in one type, as it takes them: counters are int64 in 64-bit mode."""
    return tuple(jnp.asarray(start, jnp.int32) for start in starts)


def _operand_type(x: jax.Array) -> jnp.dtype:
    """What a tile and decoded weights are multiplied in: bfloat16 natively, others as float32."""
    return x.dtype if x.dtype == jnp.bfloat16 else jnp.promote_types(x.dtype, jnp.float32)


def _dot(rows: jax.Array, columns: jax.Array, *, contract: int) -> jax.Array:
    """Float32 product of [R, K] with dimension `contract` of a decoded block."""
    dtype = _operand_type(rows)
    return lax.dot_general(
        rows.astype(dtype),
        columns,
        (((1,), (contract,)), ((), ())),
        precision=None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
