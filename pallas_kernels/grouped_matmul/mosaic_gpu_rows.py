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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_plan import (
    CONSUMERS,
    DEPTH,
    SHARED_BYTES,
    Ring,
    fitting_width,
    kernel,
    loop,
    matrix_in_smem,
    multiply_steps,
    pad_to,
    plan_rows,
    round_up,
    share_of_block,
    store_untiled,
)
from pallas_kernels.tiles import choose_tiles


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Sizes of the kernel's tiles.

    Attributes:
        rows: of a tile, 128 or 64.
        columns: of the accumulators of a tile together, at most 256.
        stages: most buffers of the ring.
        chunk: columns that are stored at once; half as many where the epilogue takes extra rows,
            since the gradients of an activation need the registers.
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
    padded_rows = max(num_rows, tiles.rows)
    padded_width = round_up(width, DEPTH)
    padded_columns = round_up(num_columns, tiles.least_columns)
    rows = tuple(pad_to(x, d0=padded_rows, d1=padded_width) for x in rows)
    extras = tuple(pad_to(x, d0=padded_rows, d1=padded_columns) for x in extras)
    sizes = padded_columns, padded_width
    sizes = sizes if products.transposed else sizes[::-1]
    matrices = tuple(pad_to(w, d1=sizes[0], d2=sizes[1]) for w in matrices)
    call = _Call(
        products, tiles, padded_rows, padded_width, padded_columns, num_groups, jnp.dtype(dtype),
        len(rows), len(extras),
    )  # fmt: skip
    plan = plan_rows(group_sizes, padded_rows, tiles.rows)
    results = call.kernel()(
        plan.groups, plan.starts, plan.firsts, plan.lasts, plan.num_tiles, *rows, *matrices, *extras
    )
    return tuple(result[:num_rows, :num_columns] for result in results)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One kernel for arrays of given sizes."""

    products: RowProducts
    tiles: RowTiles
    num_rows: int
    width: int
    num_columns: int
    num_groups: int
    dtype: jnp.dtype
    num_operands: int
    num_extras: int

    @property
    def num_matrices(self) -> int:
        return len(self.products.operand_of)

    @property
    def num_sums(self) -> int:
        return 1 if self.products.summed else self.num_matrices

    @property
    def columns(self) -> int:
        """Output columns of a tile."""
        limit = self.tiles.columns // self.num_sums
        return fitting_width(self.num_columns, limit, self.tiles.least_columns)

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of a tile that one warpgroup computes."""
        if self.tiles.splits_rows:
            return self.tiles.rows // CONSUMERS, self.columns
        return self.tiles.rows, self.columns // CONSUMERS

    @property
    def chunk(self) -> int:
        return min(self.tiles.chunk, self.part[1]) // (2 if self.num_extras else 1)

    @property
    def steps_per_matrix(self) -> int:
        return self.width // DEPTH

    def kernel(self):
        """The Pallas call."""
        rows, columns, chunk = self.tiles.rows, self.columns, self.chunk
        block = (columns, DEPTH) if self.products.transposed else (DEPTH, columns)
        part_rows, part_columns = self.part
        outputs = self.products.num_outputs
        itemsize = self.dtype.itemsize
        stored = CONSUMERS * part_rows * chunk * itemsize * outputs
        extra = self.num_extras * rows * columns * 2
        slot = (rows + self.num_sums * columns) * DEPTH * 2
        stages = min(self.tiles.stages, (SHARED_BYTES - 3 * stored - extra) // slot)
        scratch = {
            "rows_smem": matrix_in_smem((stages, rows, DEPTH), jnp.bfloat16),
            "matrices_smem": [
                matrix_in_smem((stages, *block), jnp.bfloat16) for _ in range(self.num_sums)
            ],
            "extras_smem": [
                matrix_in_smem((CONSUMERS, part_rows, part_columns), jnp.bfloat16, chunk)
                for _ in range(self.num_extras)
            ],
            "whole_smem": matrix_in_smem((CONSUMERS, 2, outputs, part_rows, chunk), self.dtype),
            "parted_smem": plgpu.SMEM((CONSUMERS, outputs, part_rows, chunk), self.dtype),
            "full": plgpu.Barrier(num_arrivals=1 + self.num_sums, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            "extras_full": plgpu.Barrier(
                num_arrivals=max(self.num_extras, 1), num_barriers=CONSUMERS
            ),
        }
        shape = jax.ShapeDtypeStruct((self.num_rows, self.num_columns), self.dtype)
        flops = 2 * self.num_rows * self.width * self.num_columns * self.num_matrices
        moved = self.num_operands * self.num_rows * self.width * 2
        moved += self.num_matrices * self.num_groups * self.width * self.num_columns * 2
        moved += self.num_rows * self.num_columns * (2 * self.num_extras + itemsize * outputs)
        return kernel(
            lambda *refs, **scratch: _Body(self, stages, refs, scratch).run(),
            cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
            out_type=(shape,) * outputs,
            scratch_types=scratch,
            grid=(self.tiles.blocks,),
            grid_names=("block",),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            kernel_name=self.products.name,
        )


class _Body:
    """The kernel as a loop over tiles, for the loading and for the multiplying warpgroups."""

    def __init__(self, call: _Call, num_slots: int, refs, scratch):
        self.call = call
        counts = (
            5,
            call.num_operands,
            call.num_matrices,
            call.num_extras,
            call.products.num_outputs,
        )
        parts, refs = [], list(refs)
        for count in counts:
            parts.append(refs[:count])
            refs = refs[count:]
        (self.groups, self.starts, self.firsts, self.lasts, self.num_tiles), *arrays = parts
        self.rows, self.matrices, self.extras, self.outputs = arrays
        self.smem = scratch
        self.ring = Ring(num_slots, scratch["full"], scratch["empty"])
        self.warpgroup = lax.axis_index("warpgroup")
        self.num_parts = call.num_columns // call.columns
        self.num_mine = share_of_block(self.num_tiles[0] * self.num_parts, call.tiles.blocks)

    def run(self) -> None:
        @pl.when(self.warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            self.ring.drain(self._over_tiles(self._load_tile))

        @pl.when(self.warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            self._over_tiles(self._multiply_tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    def _over_tiles(self, visit) -> jax.Array:
        """Call `visit(tile, first column, group, first step, steps)`; return the steps of all."""
        call = self.call
        num_steps = call.steps_per_matrix * (call.num_matrices if call.products.summed else 1)

        def of_item(index, step):
            item = index * call.tiles.blocks + lax.axis_index("block")
            tile = lax.div(item, jnp.int32(self.num_parts))
            column = lax.rem(item, jnp.int32(self.num_parts)) * call.columns
            group = self.groups[tile]
            steps = lax.select(group < call.num_groups, jnp.int32(num_steps), jnp.int32(0))
            visit(tile, column, group, step, steps)
            return step + steps

        return lax.fori_loop(0, self.num_mine, of_item, jnp.int32(0))

    def _load_tile(self, tile, column, group, first_step, steps) -> None:
        call, products = self.call, self.call.products
        start = self.starts[tile]

        def load(rows, matrices, step, slot):
            depth = pl.ds(step * DEPTH, DEPTH)
            columns = pl.ds(column, call.columns)
            barrier = self.smem["full"].at[slot]
            here = rows.at[pl.ds(start, call.tiles.rows), depth]
            plgpu.copy_gmem_to_smem(here, self.smem["rows_smem"].at[slot], barrier)
            window = (columns, depth) if products.transposed else (depth, columns)
            for matrix, smem in zip(matrices, self.smem["matrices_smem"], strict=True):
                plgpu.copy_gmem_to_smem(matrix.at[group, *window], smem.at[slot], barrier)

        def load_step(i):
            slot = self.ring.wait_empty(first_step + i)
            if not products.summed:
                load(self.rows[0], self.matrices, i, slot)
                return
            for number, matrix in enumerate(self.matrices):
                step = i - number * call.steps_per_matrix

                @pl.when((step >= 0) & (step < call.steps_per_matrix))
                def _(number=number, matrix=matrix, step=step):
                    load(self.rows[products.operand_of[number]], [matrix], step, slot)

        loop(steps, load_step)

    def _multiply_tile(self, tile, column, group, first_step, steps) -> None:
        call = self.call
        part_rows, part_columns = call.part
        row = self.warpgroup * part_rows if call.tiles.splits_rows else 0
        offset = 0 if call.tiles.splits_rows else self.warpgroup * part_columns
        start = self.starts[tile] + row
        column = column + offset
        first, last = (jnp.clip(ref[tile] - row, 0, part_rows) for ref in (self.firsts, self.lasts))
        self._load_extras(start, column)

        def multiply(*sums):
            def products(_, slot):
                rows = self.smem["rows_smem"].at[slot, pl.ds(row, part_rows)]
                columns = pl.ds(offset, part_columns)
                for total, smem in zip(sums, self.smem["matrices_smem"], strict=True):
                    if call.products.transposed:
                        matrix = smem.at[slot, columns].transpose((1, 0))
                    else:
                        matrix = smem.at[slot, :, columns]
                    plgpu.wgmma(total, rows, matrix)

            multiply_steps(self.ring, first_step, steps, products)
            return [total[...] for total in sums]

        accumulator = plgpu.ACC(call.part, jnp.float32)
        sums = pl.run_scoped(multiply, *[accumulator] * call.num_sums)
        if self.extras:
            plgpu.barrier_wait(self.smem["extras_full"].at[self.warpgroup])
        for number in range(part_columns // call.chunk):
            begin = number * call.chunk
            chunk = slice(begin, begin + call.chunk)
            extras = [
                smem[self.warpgroup, :, chunk].astype(jnp.float32)
                for smem in self.smem["extras_smem"]
            ]
            results = call.products.epilogue([total[:, chunk] for total in sums], extras)
            results = [x.astype(call.dtype) for x in results]
            if call.products.num_outputs > 1 or self.call.num_sums > 1:
                # The activation of rows of no group need not be 0.
                results = [jnp.where(steps > 0, x, jnp.zeros_like(x)) for x in results]
            self._store(results, number % 2, start, column + begin, first, last)

    def _load_extras(self, start, column) -> None:
        part_rows, part_columns = self.call.part
        for extra, smem in zip(self.extras, self.smem["extras_smem"], strict=True):
            here = extra.at[pl.ds(start, part_rows), pl.ds(column, part_columns)]
            barrier = self.smem["extras_full"].at[self.warpgroup]
            plgpu.copy_gmem_to_smem(here, smem.at[self.warpgroup], barrier)

    def _store(self, results, buffer: int, start, column, first, last) -> None:
        """Write rows `first` to `last` of a chunk of the results."""
        part_rows, chunk = self.call.part[0], self.call.chunk
        columns = pl.ds(column, chunk)
        is_whole = last - first == part_rows

        @pl.when(is_whole)
        def _():
            whole = self.smem["whole_smem"].at[self.warpgroup, buffer]
            # What this buffer held has left it: the chunk before the last, where there are two.
            pending = len(results) if chunk < self.call.part[1] else 0
            plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
            for number, result in enumerate(results):
                whole[number] = result
            plgpu.commit_smem()
            for number, output in enumerate(self.outputs):
                there = output.at[pl.ds(start, part_rows), columns]
                plgpu.copy_smem_to_gmem(whole.at[number], there)

        # Copies have static sizes: any number of rows is a sum of powers of two.
        @pl.when(jnp.logical_not(is_whole) & (last > first))
        def _():
            parted = self.smem["parted_smem"].at[self.warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for number, result in enumerate(results):
                store_untiled(parted.at[number], result)
            plgpu.commit_smem()
            count, row, size = last - first, first, part_rows // 2
            while size:

                @pl.when(count & size != 0)
                def _(row=row, size=size):
                    for number, output in enumerate(self.outputs):
                        there = output.at[pl.ds(start + row, size), columns]
                        plgpu.copy_smem_to_gmem(parted.at[number, pl.ds(row, size)], there)

                row = row + (count & size)
                size //= 2
