"""The kernel of the matrices' gradients: the rows of each group against one another.

    result[e] = x[rows of e]^T @ d[rows of e]

The grid is (blocks of K, blocks of N, visits). A block's sum stays in vector memory while the rows
of its group pass by, and is written once. Groups without rows are visited once and get zero.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.mosaic_tpu_decode import LANES
from pallas_kernels.grouped_matmul.mosaic_tpu_rows import block_width, scratch_bytes, vector_memory
from pallas_kernels.grouped_matmul.mosaic_tpu_visits import matrix_visits
from pallas_kernels.tiles import choose_tiles


@dataclasses.dataclass(frozen=True)
class MatrixTiles:
    """Sizes of the kernel's tiles.

    Attributes:
        rows: of a tile, a multiple of `part`.
        part: rows that are multiplied at once in a tile that groups share, a multiple of 16.
        height: rows of a result that are computed at once, a multiple of 128.
        block: most rows of a block of the result.
        sum_bytes: most bytes of a block's float32 sum.
    """

    rows: int = 512
    part: int = 128
    height: int = 896
    block: int = 1792
    sum_bytes: int = 12 << 20

    def fit(self, num_rows: int) -> "MatrixTiles":
        """Tiles for fewer rows than a tile, which are then one tile."""
        rows = min(self.rows, -(-num_rows // 16) * 16)
        part = min(self.part, rows)
        return dataclasses.replace(self, rows=-(-rows // part) * part, part=part)


def multiply_groups(x: jax.Array, d: jax.Array, group_sizes: jax.Array, dtype) -> jax.Array:
    """x^T @ d of each group, [E, K, N] in `dtype`.

    Args:
        x: [M, K].
        d: [M, N] of the same dtype.
        group_sizes: int32 [E].
        dtype: of the result; sums are float32.
    """
    (num_rows, width), num_columns = x.shape, d.shape[1]
    num_groups = group_sizes.shape[0]
    tiles = choose_tiles("grouped_matrices_tpu", MatrixTiles()).fit(num_rows)
    height = block_width(width, tiles.block, LANES)
    columns = block_width(num_columns, tiles.sum_bytes // (4 * height), LANES)
    visits = matrix_visits(group_sizes, num_rows, tiles.rows)
    specs = [
        pl.BlockSpec((tiles.rows, height), lambda i, j, v, g, source, *_: (source[v], i)),
        pl.BlockSpec((tiles.rows, columns), lambda i, j, v, g, source, *_: (source[v], j)),
    ]
    output = jax.ShapeDtypeStruct((num_groups, width, num_columns), dtype)
    output_spec = pl.BlockSpec((1, height, columns), lambda i, j, v, group, *_: (group[v], i, j))
    scratch = [pltpu.VMEM((height, columns), jnp.float32)]
    blocks, blocks_of_d = width // height, num_columns // columns
    if num_rows <= tiles.rows:  # one tile, whose blocks are read again only when they change
        reads = x.nbytes + d.nbytes * (blocks if blocks_of_d > 1 else 1)
    else:
        reads = x.nbytes * blocks_of_d + d.nbytes * blocks
    return pl.pallas_call(
        functools.partial(_kernel, tiles),
        out_shape=output,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(blocks, blocks_of_d, visits.groups.shape[0]),
            in_specs=specs,
            out_specs=output_spec,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vector_memory([x, d], specs, [output], [output_spec])
            + scratch_bytes(scratch),
        ),
        # Exact where all rows belong to a group.
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * width * num_columns,
            bytes_accessed=reads + output.size * output.dtype.itemsize,
            transcendentals=0,
        ),
        name="grouped_matrices",
    )(*visits, x, d)


def _kernel(tiles, groups, sources, targets, begins, ends, counts, x, d, output, total):
    step = pl.program_id(2)
    is_active = step < counts[0]
    is_first = (step == 0) | (groups[step] != groups[jnp.maximum(step - 1, 0)])
    after = jnp.minimum(step + 1, pl.num_programs(2) - 1)
    is_last = (step == counts[0] - 1) | (groups[step] != groups[after])
    begin, end = begins[step], ends[step]
    is_full = (begin == 0) & (end == tiles.rows)

    @pl.when(is_active & is_first)
    def _():
        total[...] = jnp.zeros_like(total)

    def accumulate(own, belongs) -> None:
        height = block_width(total.shape[0], tiles.height, LANES)
        # Rows that belong to no group may hold NaN, which a product with zero would keep.
        keep = lambda a: a if belongs is None else jnp.where(belongs, a, 0)  # noqa: E731

        def of_rows(chunk, carry):
            rows = pl.ds(pl.multiple_of(chunk * height, LANES), height)
            total[rows, :] += lax.dot_general(
                keep(x[own, rows]),
                keep(d[own, :]),
                (((0,), (0,)), ((), ())),
                precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )
            return carry

        lax.fori_loop(0, total.shape[0] // height, of_rows, 0)

    @pl.when(is_active & is_full)
    def _():
        accumulate(slice(None), None)

    @pl.when(is_active & ~is_full)
    def _():
        def of_part(part, carry):
            start = pl.multiple_of(part * tiles.part, tiles.part)
            number = start + lax.broadcasted_iota(jnp.int32, (tiles.part, 1), 0)
            accumulate(pl.ds(start, tiles.part), (begin <= number) & (number < end))
            return carry

        lax.fori_loop(begin // tiles.part, (end + tiles.part - 1) // tiles.part, of_part, 0)

    @pl.when(is_active & is_last)
    def _():
        output[0] = total[...].astype(output.dtype)
