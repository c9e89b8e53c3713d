"""The Hopper kernel for gradients of matrices: rows of a group, transposed, times other rows of it.

The contraction runs over the rows of a group in blocks of 64, of which the first begins with up to
7 rows of the group before (see `mosaic_gpu_plan`). The first and the last block of a group are read
from copies [E, 2, 64, ...] in which all rows but those of the group are 0, so that rows of other
groups or of none, which may be NaN, take no part and nothing is masked in the kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_plan import (
    ALIGNED,
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
    round_up,
    share_of_block,
)
from pallas_kernels.tiles import choose_tiles


@dataclasses.dataclass(frozen=True)
class MatrixTiles:
    """Sizes of the kernel's tiles.

    Attributes:
        columns: of a tile of the result, at most 256; it has 128 rows.
        stages: most buffers of the ring.
        chunk: columns that are stored at once.
        blocks: of the grid, one per multiprocessor.
    """

    columns: int = 256
    stages: int = 4
    chunk: int = 32
    blocks: int = 132


_ROWS = 128  # of a tile of the result
_PART = _ROWS // CONSUMERS


def multiply_groups(x: jax.Array, y: jax.Array, group_sizes: jax.Array, dtype) -> jax.Array:
    """x[rows of e]^T @ y[rows of e] for each group e, [E, K, N]; 0 for empty groups.

    Args:
        x: bfloat16 [M, K].
        y: bfloat16 [M, N].
        group_sizes: int32 [E].
        dtype: of the result.
    """
    tiles = choose_tiles("grouped_matrices_gpu", MatrixTiles())
    num_rows, num_groups = x.shape[0], group_sizes.shape[0]
    width, num_columns = x.shape[1], y.shape[1]
    padded_width, padded_columns = round_up(width, _ROWS), round_up(num_columns, 64)
    x, y = pad_to(x, d1=padded_width), pad_to(y, d1=padded_columns)
    ends = jnp.cumsum(group_sizes)
    aligned = (ends - group_sizes) // ALIGNED * ALIGNED
    num_blocks = jnp.where(group_sizes > 0, (ends - aligned + DEPTH - 1) // DEPTH, 0)
    # Rows of the first and the last block of each group.
    begins = jnp.stack([aligned, aligned + (num_blocks - 1) * DEPTH], axis=1)
    edge_rows = begins[..., None] + jnp.arange(DEPTH)
    is_own = (edge_rows >= (ends - group_sizes)[:, None, None]) & (edge_rows < ends[:, None, None])
    x_edges, y_edges = (
        jnp.where(is_own[..., None], a.at[edge_rows].get(mode="clip"), 0) for a in (x, y)
    )
    call = _Call(tiles, num_rows, padded_width, padded_columns, num_groups, jnp.dtype(dtype))
    plan = aligned.astype(jnp.int32), num_blocks.astype(jnp.int32)
    result = call.kernel()(*plan, pad_to(x, d0=DEPTH), pad_to(y, d0=DEPTH), x_edges, y_edges)
    return result[:, :width, :num_columns]


@dataclasses.dataclass(frozen=True)
class _Call:
    """One kernel for arrays of given sizes."""

    tiles: MatrixTiles
    num_rows: int
    width: int
    num_columns: int
    num_groups: int
    dtype: jnp.dtype

    @property
    def columns(self) -> int:
        return fitting_width(self.num_columns, self.tiles.columns)

    def kernel(self):
        """The Pallas call."""
        chunk = min(self.tiles.chunk, self.columns)
        stored = CONSUMERS * 2 * _PART * chunk * self.dtype.itemsize
        slot = (_ROWS + self.columns) * DEPTH * 2
        stages = min(self.tiles.stages, (SHARED_BYTES - stored) // slot)
        scratch = {
            "x_smem": matrix_in_smem((stages, DEPTH, _ROWS), jnp.bfloat16),
            "y_smem": matrix_in_smem((stages, DEPTH, self.columns), jnp.bfloat16),
            "result_smem": matrix_in_smem((CONSUMERS, 2, _PART, chunk), self.dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        }
        matrices = self.num_groups * self.width * self.num_columns
        cost = pl.CostEstimate(
            flops=2 * self.num_rows * self.width * self.num_columns,
            bytes_accessed=2 * self.num_rows * (self.width + self.num_columns)
            + matrices * self.dtype.itemsize,
            transcendentals=0,
        )
        shape = (self.num_groups, self.width, self.num_columns)
        return kernel(
            lambda *refs, **scratch: _run(self, stages, chunk, *refs, **scratch),
            cost_estimate=cost,
            out_type=jax.ShapeDtypeStruct(shape, self.dtype),
            scratch_types=scratch,
            grid=(self.tiles.blocks,),
            grid_names=("block",),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            kernel_name="grouped_matrices_gradient",
        )


def _run(
    call: _Call, num_slots: int, chunk: int, starts, num_blocks, x, y, x_edges, y_edges, result, *,
    x_smem, y_smem, result_smem, full, empty,
):  # fmt: skip
    ring = Ring(num_slots, full, empty)
    warpgroup = lax.axis_index("warpgroup")
    num_down, num_across = call.width // _ROWS, call.num_columns // call.columns
    num_mine = share_of_block(jnp.int32(call.num_groups * num_down * num_across), call.tiles.blocks)

    def over_tiles(visit):
        def of_item(index, step):
            item = index * call.tiles.blocks + lax.axis_index("block")
            column = lax.rem(item, jnp.int32(num_across)) * call.columns
            item = lax.div(item, jnp.int32(num_across))
            row = lax.rem(item, jnp.int32(num_down)) * _ROWS
            group = lax.div(item, jnp.int32(num_down))
            steps = num_blocks[group]
            visit(group, row, column, step, steps)
            return step + steps

        return lax.fori_loop(0, num_mine, of_item, jnp.int32(0))

    def load_tile(group, row, column, first_step, steps):
        start = starts[group]

        def load(x, y, slot):
            plgpu.copy_gmem_to_smem(x.at[:, pl.ds(row, _ROWS)], x_smem.at[slot], full.at[slot])
            columns = pl.ds(column, call.columns)
            plgpu.copy_gmem_to_smem(y.at[:, columns], y_smem.at[slot], full.at[slot])

        def load_step(i):
            slot = ring.wait_empty(first_step + i)

            is_edge = (i == 0) | (i == steps - 1)

            @pl.when(is_edge)
            def _():
                edge = lax.select(i == 0, jnp.int32(0), jnp.int32(1))
                load(x_edges.at[group, edge], y_edges.at[group, edge], slot)

            @pl.when(jnp.logical_not(is_edge))
            def _():
                here = pl.ds(start + i * DEPTH, DEPTH)
                load(x.at[here], y.at[here], slot)

        loop(steps, load_step)

    def multiply_tile(group, row, column, first_step, steps):
        part = pl.ds(warpgroup * _PART, _PART)

        def multiply(total):
            def products(_, slot):
                plgpu.wgmma(total, x_smem.at[slot, :, part].transpose((1, 0)), y_smem.at[slot])

            multiply_steps(ring, first_step, steps, products)
            return total[...]

        total = pl.run_scoped(multiply, plgpu.ACC((_PART, call.columns), jnp.float32))
        there = result.at[group, pl.ds(row + warpgroup * _PART, _PART)]
        for number in range(call.columns // chunk):
            begin = number * chunk
            buffer = result_smem.at[warpgroup, number % 2]
            plgpu.wait_smem_to_gmem(1 if call.columns > chunk else 0, wait_read_only=True)
            buffer[...] = total[:, begin : begin + chunk].astype(call.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, there.at[:, pl.ds(column + begin, chunk)])

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        ring.drain(over_tiles(load_tile))

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        over_tiles(multiply_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
