"""The Hopper kernel that multiplies rows with the matrices of their groups.

A block computes one tile of the output after another. One warpgroup copies blocks of rows and of
matrices into a ring of buffers; two others multiply, each one half of the tile, and store it while
the buffers fill for the next tile. Columns are the fastest index: the tiles that are computed at
one time share few rows and the matrices of a group or two, which then come from the L2 cache.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_body import RowBody
from pallas_kernels.grouped_matmul.mosaic_gpu_plan import (
    CONSUMERS,
    DEPTH,
    SHARED_BYTES,
    fitting_width,
    kernel,
    loadable_rows,
    matrix_in_smem,
    pad_to,
    plan_rows,
    round_up,
)
from pallas_kernels.tiles import choose_tiles


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Sizes of the kernel's tiles.

    Attributes:
        rows: of a tile, 128 or 64.
        columns: of the accumulators of a tile together, at most 256.
        stages: most buffers of the ring.
        chunk: columns that are stored at once; half as many where there are extra rows or several
            matrices, since activations, their gradients and the addresses need the registers.
        blocks: of the grid, one per multiprocessor.
    """

    rows: int = 128
    columns: int = 256
    stages: int = 4
    chunk: int = 32
    blocks: int = 132

    @property
    def splits_rows(self) -> bool:
        """Whether a tile is shared between two warpgroups by rows: each has a multiple of 64."""
        return self.rows % 128 == 0

    @property
    def least_columns(self) -> int:
        """Columns of the smallest tile: 64, which is as far as the memory's layout repeats."""
        return 64 if self.splits_rows else 64 * CONSUMERS


FEW_TILES = RowTiles(rows=64, columns=128, stages=8)
FEW_ROWS = 64  # mean rows of a group up to which matrices are streamed, with tiles of their own


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowProducts:
    """What the kernel computes of the products of a tile.

    Attributes:
        name: of the kernel.
        operand_of: which rows each matrix is multiplied with.
        transposed: multiply with the transposed matrices.
        summed: the products are added up in one accumulator; else each has its own.
        epilogue: (float32 products, extra rows) -> results, elementwise.
        num_outputs: how many.
    """

    name: str
    operand_of: tuple[int, ...]
    transposed: bool
    epilogue: Callable
    summed: bool = False
    num_outputs: int = 1


def multiply_rows(
    products: RowProducts,
    rows: tuple[jax.Array, ...],
    matrices: tuple[jax.Array, ...],
    extras: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    dtype,
) -> tuple[jax.Array, ...]:
    """Results [M, N] of `products.epilogue`; rows that belong to no group are zero.

    Args:
        products: what to compute.
        rows: bfloat16 arrays [M, K].
        matrices: bfloat16 [E, K, N], or [E, N, K] where transposed.
        extras: bfloat16 arrays [M, N] that the epilogue takes besides the products.
        group_sizes: int32 [E].
        dtype: of the results.
    """
    num_rows, width = rows[0].shape
    num_groups = group_sizes.shape[0]
    num_columns = matrices[0].shape[1 if products.transposed else 2]
    is_few = num_rows <= FEW_ROWS * num_groups
    tiles = choose_tiles(
        "grouped_few_rows_gpu" if is_few else "grouped_rows_gpu",
        FEW_TILES if is_few else RowTiles(),
    )
    loadable = loadable_rows(num_rows, tiles.rows)
    padded_width = round_up(width, DEPTH)
    padded_columns = round_up(num_columns, tiles.least_columns)
    rows = tuple(pad_to(x, d0=loadable, d1=padded_width) for x in rows)
    extras = tuple(pad_to(x, d0=loadable, d1=padded_columns) for x in extras)
    sizes = padded_columns, padded_width
    sizes = sizes if products.transposed else sizes[::-1]
    matrices = tuple(pad_to(w, d1=sizes[0], d2=sizes[1]) for w in matrices)
    call = RowCall(
        products, tiles, num_rows, padded_width, padded_columns, num_groups, jnp.dtype(dtype),
        len(extras),
    )  # fmt: skip
    results = call.run(group_sizes, rows, matrices, extras)
    return tuple(result[:, :num_columns] for result in results)


@dataclasses.dataclass(frozen=True)
class RowCall:
    """One kernel for arrays of given sizes, padded to multiples of the tiles."""

    products: RowProducts
    tiles: RowTiles
    num_rows: int
    width: int
    num_columns: int
    num_groups: int
    dtype: jnp.dtype
    num_extras: int = 0

    # Warpgroups that decode matrices, registers of a thread that loads, multiplies, decodes, and
    # shared memory of decoded blocks.
    num_decoders = 0
    registers = (40, 232, 0)
    decoded_bytes = 0

    @property
    def num_matrices(self) -> int:
        return len(self.products.operand_of)

    @property
    def num_sums(self) -> int:
        return 1 if self.products.summed else self.num_matrices

    @property
    def least_columns(self) -> int:
        """Columns of the smallest tile."""
        return self.tiles.least_columns

    @property
    def columns(self) -> int:
        """Output columns of a tile."""
        limit = self.tiles.columns // self.num_sums
        return fitting_width(self.num_columns, limit, self.least_columns)

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of a tile that one warpgroup computes."""
        if self.tiles.splits_rows:
            return self.tiles.rows // CONSUMERS, self.columns
        return self.tiles.rows, self.columns // CONSUMERS

    @property
    def chunk(self) -> int:
        needs_room = self.num_extras or self.num_matrices > 1
        return min(self.tiles.chunk, self.part[1]) // (2 if needs_room else 1)

    @property
    def flops(self) -> int:
        return 2 * self.num_rows * self.width * self.num_columns * self.num_matrices

    @property
    def steps_per_matrix(self) -> int:
        return self.width // DEPTH

    @property
    def copies_per_slot(self) -> int:
        """Copies that fill the buffers of one step."""
        return 1 + self.num_sums

    @property
    def slot_bytes(self) -> int:
        """Shared memory of the buffers of one step."""
        return (self.tiles.rows + self.num_sums * self.columns) * DEPTH * 2

    def buffers(self, stages: int) -> dict:
        """Shared memory of the ring."""
        block = (self.columns, DEPTH) if self.products.transposed else (DEPTH, self.columns)
        return {
            "rows_smem": matrix_in_smem((stages, self.tiles.rows, DEPTH), jnp.bfloat16),
            "matrices_smem": [
                matrix_in_smem((stages, *block), jnp.bfloat16) for _ in range(self.num_sums)
            ],
        }

    def make_body(self, stages: int, refs, scratch) -> RowBody:
        """The kernel as it runs on each block."""
        return RowBody(self, stages, refs, scratch)

    def run(self, group_sizes, rows, matrices, extras) -> tuple[jax.Array, ...]:
        """Results [M, N] of tuples of arrays."""
        chunk, (part_rows, part_columns) = self.chunk, self.part
        outputs = self.products.num_outputs
        stored = CONSUMERS * part_rows * chunk * self.dtype.itemsize * outputs
        extra = self.num_extras * self.tiles.rows * self.columns * 2
        free = SHARED_BYTES - 3 * stored - extra - self.decoded_bytes
        stages = min(self.tiles.stages, free // self.slot_bytes)
        if stages < 1:
            raise ValueError(
                f"{self.products.name}: {self.tiles} need more than {SHARED_BYTES} bytes of shared "
                "memory; use fewer rows, columns or a smaller chunk"
            )
        scratch = self.buffers(stages) | {
            "extras_smem": [
                matrix_in_smem((CONSUMERS, part_rows, part_columns), jnp.bfloat16, chunk)
                for _ in range(self.num_extras)
            ],
            "whole_smem": matrix_in_smem((CONSUMERS, 2, outputs, part_rows, chunk), self.dtype),
            "parted_smem": plgpu.SMEM((CONSUMERS, outputs, part_rows, chunk), self.dtype),
            "full": plgpu.Barrier(num_arrivals=self.copies_per_slot, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            "extras_full": plgpu.Barrier(
                num_arrivals=max(self.num_extras, 1), num_barriers=CONSUMERS
            ),
        }
        plan = plan_rows(group_sizes, self.num_rows, self.tiles.rows)
        groups = [plan.groups, plan.starts, plan.firsts, plan.lasts, plan.num_tiles]
        arrays = groups, jax.tree.leaves(rows), jax.tree.leaves(matrices), list(extras)
        counts = [len(part) for part in arrays] + [outputs]

        def body(*refs, **scratch):
            refs = list(refs)
            parts = [[refs.pop(0) for _ in range(count)] for count in counts]
            self.make_body(stages, parts, scratch).run()

        moved = sum(x.size * x.dtype.itemsize for part in arrays[1:] for x in part)
        results = kernel(
            body,
            cost_estimate=pl.CostEstimate(
                flops=self.flops,
                bytes_accessed=moved
                + outputs * self.num_rows * self.num_columns * self.dtype.itemsize,
                transcendentals=0,
            ),
            out_type=(jax.ShapeDtypeStruct((self.num_rows, self.num_columns), self.dtype),)
            * outputs,
            scratch_types=scratch,
            grid=(self.tiles.blocks,),
            grid_names=("block",),
            num_threads=CONSUMERS + 1 + self.num_decoders,
            thread_name="warpgroup",
            kernel_name=self.products.name,
        )(*[x for part in arrays for x in part])
        return tuple(results)
