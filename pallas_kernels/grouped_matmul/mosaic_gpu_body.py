"""What the warpgroups of a block do in the Hopper kernel for rows times matrices.

`RowCall` (see `mosaic_gpu_rows`) has the sizes; here is the loop over tiles: one warpgroup loads,
two multiply, each one half of a tile, and store it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_plan import (
    ALIGNED,
    CONSUMERS,
    DEPTH,
    Ring,
    loop,
    multiply_steps,
    share_of_block,
    store_untiled,
)


class RowBody:
    """The kernel as a loop over tiles, for the loading and for the multiplying warpgroups."""

    def __init__(self, call, num_slots: int, parts, scratch):
        self.call = call
        (self.groups, self.starts, self.firsts, self.lasts, self.num_tiles), *arrays = parts
        self.rows, self.matrices, self.extras, self.outputs = arrays
        self.smem = scratch
        self.ring = Ring(num_slots, scratch["full"], scratch["empty"])
        self.warpgroup = lax.axis_index("warpgroup")
        self.num_parts = call.num_columns // call.columns
        self.num_mine = share_of_block(self.num_tiles[0] * self.num_parts, call.tiles.blocks)

    def run(self) -> None:
        """Take the part of this warpgroup."""
        loading, multiplying, decoding = self.call.registers

        @pl.when(self.warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(loading, action="decrease")
            self.ring.drain(self._over_tiles(self.load_tile))

        @pl.when(self.warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(multiplying, action="increase")
            self._over_tiles(self._multiply_tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        if self.call.num_decoders:

            @pl.when(self.warpgroup > CONSUMERS)
            def _():
                plgpu.set_max_registers(decoding, action="decrease")
                self.ring.decoded.drain(self._over_tiles(self.decode_tile))

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

    def load_tile(self, tile, column, group, first_step, steps) -> None:
        """Fill the ring with what one tile is computed of."""
        call, products = self.call, self.call.products
        start = self.starts[tile]

        def load_step(i):
            slot = self.ring.wait_empty(first_step + i)
            if not products.summed:
                self.load(self.rows[0], self.matrices, start, column, group, i, slot)
                return
            for number, operand in enumerate(products.operand_of):
                step = i - number * call.steps_per_matrix

                @pl.when((step >= 0) & (step < call.steps_per_matrix))
                def _(number=number, operand=operand, step=step):
                    matrix = self.matrices[number : number + 1]
                    self.load(self.rows[operand], matrix, start, column, group, step, slot)

        loop(steps, load_step)

    def load(self, rows, matrices, start, column, group, step, slot) -> None:
        """Copy the blocks of one step, one of rows and one of each matrix."""
        depth = pl.ds(step * DEPTH, DEPTH)
        columns = pl.ds(column, self.call.columns)
        barrier = self.smem["full"].at[slot]
        here = rows.at[pl.ds(start, self.call.tiles.rows), depth]
        plgpu.copy_gmem_to_smem(here, self.smem["rows_smem"].at[slot], barrier)
        window = (columns, depth) if self.call.products.transposed else (depth, columns)
        for matrix, smem in zip(matrices, self.smem["matrices_smem"], strict=True):
            plgpu.copy_gmem_to_smem(matrix.at[group, *window], smem.at[slot], barrier)

    def multiply(self, sums, step, slot, rows, columns) -> None:
        """Issue the products of one step: these rows and these columns of the tile."""
        x = self.smem["rows_smem"].at[slot, rows]
        for total, smem in zip(sums, self.smem["matrices_smem"], strict=True):
            if self.call.products.transposed:
                matrix = smem.at[slot, columns].transpose((1, 0))
            else:
                matrix = smem.at[slot, :, columns]
            plgpu.wgmma(total, x, matrix)

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
            def products(step, slot):
                windows = pl.ds(row, part_rows), pl.ds(offset, part_columns)
                self.multiply(sums, step, slot, *windows)

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
        if self.extras:
            plgpu.commit_smem()  # what was read of the tile before is read before it is overwritten
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

        @pl.when(jnp.logical_not(is_whole) & (last > first))
        def _():
            parted = self.smem["parted_smem"].at[self.warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for number, result in enumerate(results):
                store_untiled(parted.at[number], result)
            plgpu.commit_smem()

            def copy(row, size):
                for number, output in enumerate(self.outputs):
                    there = output.at[pl.ds(start + row, size), columns]
                    plgpu.copy_smem_to_gmem(parted.at[number, pl.ds(row, size)], there)

            # 8 rows at a time from the first multiple of 8 on, and row by row what lies before and
            # behind: one loop for both, whose addresses take half the registers of two.
            begin = jnp.minimum(lax.div(first + (ALIGNED - 1), jnp.int32(ALIGNED)) * ALIGNED, last)
            num_blocks = lax.div(last - begin, jnp.int32(ALIGNED))
            skipped = num_blocks * ALIGNED
            loop(num_blocks, lambda i: copy(begin + i * ALIGNED, ALIGNED))
            loop(
                last - skipped,
                lambda row: copy(jnp.where(row < begin, row, row + skipped), 1),
                first,
            )
