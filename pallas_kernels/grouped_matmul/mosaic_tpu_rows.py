"""The kernel that multiplies rows with the matrices of their groups.

The grid is (blocks of output columns, visits). A block of a matrix, all of its input width, stays
in vector memory while the rows of its group pass by; each output element is computed in one step.
A tile that one group fills is one product. Of others only the parts that hold rows of the group
are multiplied, and only the group's rows of the result are stored.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.mosaic_tpu_decode import (
    LANES,
    decode_matrix,
    decode_rows,
    scale_scratch,
)
from pallas_kernels.grouped_matmul.mosaic_tpu_visits import num_steps, row_visits
from pallas_kernels.mxfp4 import MXFP4
from pallas_kernels.mxfp8 import MXFP8
from pallas_kernels.tiles import choose_tiles


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Sizes of the kernel's tiles.

    Attributes:
        rows: of a tile, a multiple of `part`.
        part: rows that are multiplied at once in a tile that groups share, a multiple of 16.
        columns: output columns that are computed at once, a multiple of 128.
        weight_bytes: most bytes of the (decoded) blocks of the matrices in vector memory; the
            pipeline holds those that are not decoded twice.
    """

    rows: int = 512
    part: int = 128
    columns: int = 512
    weight_bytes: int = 12 << 20

    def fit(self, num_rows: int) -> "RowTiles":
        """Tiles for fewer rows than a tile, which are then one tile."""
        rows = min(self.rows, -(-num_rows // 32) * 32)
        part = min(self.part, rows)
        return dataclasses.replace(self, rows=-(-rows // part) * part, part=part)


DECODE_TILES = RowTiles(rows=64, part=32, columns=512, weight_bytes=8 << 20)
FEW_ROWS = 64  # up to here a call streams matrices rather than rows, and has tiles of its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowProducts:
    """What the kernel computes of the products of a tile.

    Attributes:
        name: of the kernel.
        operand_of: which rows each matrix is multiplied with.
        transposed: multiply with the transposed matrices.
        epilogue: (float32 products, extra rows) -> results, elementwise.
        num_outputs: how many results.
        transcendentals: transcendental functions that `epilogue` evaluates for each element.
    """

    name: str
    operand_of: tuple[int, ...]
    transposed: bool
    epilogue: Callable
    num_outputs: int = 1
    transcendentals: int = 0


def block_width(total: int, limit: int, multiple: int) -> int:
    """The largest multiple of `multiple` that divides `total` and is at most `limit`, at least one.

    `total` is a multiple of `multiple`.
    """
    units = total // multiple
    fitting = [n for n in range(1, units + 1) if units % n == 0 and n * multiple <= limit]
    return max(fitting, default=1) * multiple


def multiply_rows(
    products: RowProducts,
    rows: tuple[jax.Array | MXFP8, ...],
    matrices: tuple[jax.Array | MXFP4, ...],
    extras: tuple[jax.Array, ...],
    group_sizes: jax.Array,
) -> tuple[jax.Array, ...]:
    """Results [M, N] of `products.epilogue`; rows that belong to no group are zero.

    Args:
        products: what to compute.
        rows: arrays [M, K], or `MXFP8`.
        matrices: [E, K, N], or [E, N, K] where transposed; or `MXFP4` of such shapes.
        extras: arrays [M, N] that the epilogue takes besides the products.
        group_sizes: int32 [E].
    """
    num_rows, width = rows[0].shape
    num_groups, *sizes = matrices[0].shape
    num_columns = sizes[0] if products.transposed else sizes[1]
    dtype = jnp.dtype("bfloat16") if isinstance(rows[0], MXFP8) else rows[0].dtype
    is_packed = isinstance(matrices[0], MXFP4)
    is_few = num_rows <= FEW_ROWS
    tiles = choose_tiles(
        "grouped_decode_tpu" if is_few else "grouped_rows_tpu",
        DECODE_TILES if is_few else RowTiles(),
    ).fit(num_rows)
    per_column = width * dtype.itemsize * len(matrices)
    multiple = 2 * LANES if is_packed and products.transposed else LANES
    block = block_width(num_columns, tiles.weight_bytes // per_column, multiple)
    call = _Call(products, tiles, width, num_columns, block, dtype, is_packed, len(rows))
    operands, specs = [], []
    for array in rows:
        for part in _row_arrays(array):
            operands.append(part)
            specs.append(
                pl.BlockSpec(
                    (tiles.rows, part.shape[1]), lambda n, v, g, source, *_: (source[v], 0)
                )
            )
    for matrix in matrices:
        arrays, own_specs = _matrix_arrays(matrix, products.transposed, block)
        operands += arrays
        specs += own_specs
    for extra in extras:
        operands.append(extra)
        specs.append(pl.BlockSpec((tiles.rows, block), lambda n, v, g, source, *_: (source[v], n)))
    output = jax.ShapeDtypeStruct((num_rows, num_columns), dtype)
    output_spec = pl.BlockSpec((tiles.rows, block), lambda n, v, g, s, target, *_: (target[v], n))
    scratch = call.scratch(rows, len(matrices))
    num_blocks = num_columns // block
    grid = (num_blocks, num_steps(num_rows, num_groups, tiles.rows))
    outputs = [output] * products.num_outputs
    return pl.pallas_call(
        functools.partial(_kernel, call, isinstance(rows[0], MXFP8)),
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=grid,
            in_specs=specs,
            out_specs=[output_spec] * products.num_outputs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vector_memory(operands, specs, outputs, [output_spec] * len(outputs))
            + scratch_bytes(scratch),
        ),
        cost_estimate=_cost(call, rows, matrices, extras, outputs, num_rows, num_groups),
        name=products.name,
    )(*row_visits(group_sizes, num_rows, tiles.rows), *operands)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the kernel knows of its call."""

    products: RowProducts
    tiles: RowTiles
    width: int
    num_columns: int
    block: int
    dtype: jnp.dtype
    is_packed: bool
    num_rows: int  # arrays of rows

    def scratch(self, rows, num_matrices: int) -> list[pltpu.VMEM]:
        """Decoded matrices, transposed scales, decoded rows, where there are any."""
        shape = (self.block, self.width) if self.products.transposed else (self.width, self.block)
        scratch = []
        if self.is_packed:
            scratch += [pltpu.VMEM(shape, self.dtype) for _ in range(num_matrices)]
            height = self.num_columns if self.products.transposed else self.width
            scratch.append(scale_scratch(height, shape[1]))
        if isinstance(rows[0], MXFP8):
            scratch.append(pltpu.VMEM((self.tiles.rows, self.width), self.dtype))
        return scratch


def _row_arrays(rows: jax.Array | MXFP8) -> list[jax.Array]:
    if not isinstance(rows, MXFP8):
        return [rows]
    # Whole lanes of scales, so that a register of them can be indexed.
    return [rows.codes, jnp.pad(rows.scales, ((0, 0), (0, -rows.scales.shape[1] % LANES)))]


def _matrix_arrays(matrix: jax.Array | MXFP4, transposed: bool, block: int):
    """Arrays of a stack of matrices, and the blocks of them that one step needs."""
    if not isinstance(matrix, MXFP4):
        _, height, width = matrix.shape
        if transposed:
            return [matrix], [
                pl.BlockSpec((1, block, width), lambda n, v, group, *_: (group[v], n, 0))
            ]
        return [matrix], [
            pl.BlockSpec((1, height, block), lambda n, v, group, *_: (group[v], 0, n))
        ]
    columns, scales = matrix.codes.shape[1], matrix.scales.shape[2]
    if transposed:  # blocks of input columns, which are whole lanes only of the codes
        specs = [
            pl.BlockSpec((1, columns, block // 2), lambda n, v, group, *_: (group[v], 0, n)),
            pl.BlockSpec((1, columns, scales), lambda n, v, group, *_: (group[v], 0, 0)),
        ]
    else:
        specs = [
            pl.BlockSpec((1, block, size), lambda n, v, group, *_: (group[v], n, 0))
            for size in (matrix.codes.shape[2], scales)
        ]
    return [matrix.codes, matrix.scales], specs


def vector_memory(arrays, specs, outputs, output_specs) -> int:
    """Vector memory of the blocks, each twice, and of the values between them."""
    blocks = 0
    for array, spec in zip((*arrays, *outputs), (*specs, *output_specs), strict=True):
        size = array.dtype.itemsize
        for extent, unit in zip(spec.block_shape[-2:], (8, LANES), strict=True):
            size *= -(-extent // unit) * unit
        blocks += 2 * size
    return blocks + (12 << 20)


def scratch_bytes(scratch) -> int:
    """Vector memory of the scratch arrays."""
    return sum(s.dtype.itemsize * s.shape[0] * -(-s.shape[1] // LANES) * LANES for s in scratch)


def _cost(call: _Call, rows, matrices, extras, outputs, num_rows: int, num_groups: int):
    """Exact where all groups hold rows and all rows belong to a group, else an upper bound."""
    nbytes = lambda tree: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))  # noqa: E731
    num_blocks = call.num_columns // call.block
    row_arrays = [_row_arrays(array) for array in rows]
    # A single tile stays where it is while the blocks change.
    read = (num_blocks if num_rows > call.tiles.rows else 1) * sum(
        part.size * part.dtype.itemsize for arrays in row_arrays for part in arrays
    )
    matrix_bytes = nbytes(matrices)
    if call.is_packed and call.products.transposed:  # scales come with every block
        matrix_bytes += (num_blocks - 1) * nbytes([matrix.scales for matrix in matrices])
    # No more matrices are read than there are rows.
    read += matrix_bytes * min(num_groups, num_rows) // num_groups
    element = num_rows * call.num_columns
    return pl.CostEstimate(
        flops=2 * element * call.width * len(matrices),
        bytes_accessed=read + nbytes(extras) + nbytes(outputs),
        transcendentals=element * call.products.transcendentals,
    )


def _kernel(
    call: _Call, has_packed_rows: bool, groups, sources, targets, begins, ends, counts, *refs
):
    products, tiles = call.products, call.tiles
    step = pl.program_id(1)
    before = jnp.maximum(step - 1, 0)
    refs = list(refs)
    take = lambda count: [refs.pop(0) for _ in range(count)]  # noqa: E731
    rows = take(call.num_rows * (2 if has_packed_rows else 1))
    num_matrices = len(products.operand_of)
    matrices = take(num_matrices * (2 if call.is_packed else 1))
    num_extras = len(refs) - products.num_outputs
    if call.is_packed:
        num_extras -= num_matrices + 1
    if has_packed_rows:
        num_extras -= 1
    extras, outputs = take(num_extras), take(products.num_outputs)
    is_product = step < counts[0]

    if call.is_packed:
        decoded, (scales,) = take(num_matrices), take(1)
        first = pl.program_id(0) * (call.block // (2 * LANES)) if products.transposed else 0

        @pl.when(is_product & ((step == 0) | (groups[step] != groups[before])))
        def _():
            for number, block in enumerate(decoded):
                decode_matrix(*matrices[2 * number : 2 * number + 2], block, scales, first)

        matrices = decoded
    else:
        matrices = [matrix.at[0] for matrix in matrices]

    if has_packed_rows:
        (decoded_rows,) = take(1)

        @pl.when(is_product & ((step == 0) | (sources[step] != sources[before])))
        def _():
            decode_rows(*rows, decoded_rows)

        rows = [decoded_rows]

    begin, end = begins[step], ends[step]

    def compute(start, size: int, is_whole: bool) -> None:
        """Results of `size` rows of the tile, in chunks of columns."""
        own = pl.ds(start, size)
        belongs = None
        if not is_whole:
            number = start + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
            belongs = (begin <= number) & (number < end)
        width = block_width(call.block, tiles.columns, LANES)

        def of_columns(chunk, carry):
            columns = pl.ds(pl.multiple_of(chunk * width, LANES), width)
            sums = [
                _dot(rows[operand][own, :], matrix, columns, products.transposed)
                for operand, matrix in zip(products.operand_of, matrices, strict=True)
            ]
            results = products.epilogue(sums, [extra[own, columns] for extra in extras])
            for output, result in zip(outputs, results, strict=True):
                result = result.astype(output.dtype)
                if not is_whole:
                    result = jnp.where(belongs, result, output[own, columns])
                output[own, columns] = result
            return carry

        lax.fori_loop(0, call.block // width, of_columns, 0)

    is_full = (begin == 0) & (end == tiles.rows)

    @pl.when(is_product & is_full)
    def _():
        compute(0, tiles.rows, True)

    @pl.when(is_product & ~is_full)
    def _():
        def of_part(part, carry):
            compute(pl.multiple_of(part * tiles.part, tiles.part), tiles.part, False)
            return carry

        lax.fori_loop(begin // tiles.part, (end + tiles.part - 1) // tiles.part, of_part, 0)

    @pl.when((step >= counts[0]) & (step < counts[1]))
    def _():
        number = lax.broadcasted_iota(jnp.int32, (tiles.rows, 1), 0)
        for output in outputs:
            output[...] = jnp.where(number < begin, output[...], 0)


def _dot(rows: jax.Array, matrix, columns, transposed: bool) -> jax.Array:
    """Float32 product of [R, K] with columns of a matrix, or with rows of it, transposed."""
    block = matrix[columns, :] if transposed else matrix[:, columns]
    return lax.dot_general(
        rows,
        block,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
