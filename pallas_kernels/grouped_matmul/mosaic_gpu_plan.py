"""What the Hopper kernels of grouped products share: tiles of rows, shared memory, spellings.

Copies between main memory and the swizzled memory that wgmma reads move blocks of 8 rows, and can
begin only at every eighth row (a block that begins elsewhere is cut off). The first tile of a group
therefore begins with up to 7 rows of the group before. All rows of a tile are loaded, zeros past
the end of the array; rows of its group, its own, are stored. Rows past the last group are tiles of
one more group, without products.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interpret import interpreted_platform

# Bytes of shared memory of a block on Hopper, less those of barriers and reductions.
SHARED_BYTES = 227 * 1024 - 4096

# Columns of a block in shared memory: 128 bytes of bfloat16, the widest swizzle.
DEPTH = 64

# Rows that copies move together.
ALIGNED = 8

# Warpgroups of a block: two multiply, and one loads.
CONSUMERS = 2

PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Tiles in the order of their rows, int32; entries past `num_tiles` mean nothing.

    Attributes:
        groups: of each tile; the number of groups for rows of no group.
        starts: first row, a multiple of 8.
        firsts: first own row, counted from `starts`.
        lasts: the row after the last own one.
        num_tiles: [1].
    """

    groups: jax.Array
    starts: jax.Array
    firsts: jax.Array
    lasts: jax.Array
    num_tiles: jax.Array


def plan_rows(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> RowPlan:
    """Cut the rows of each group into tiles.

    Args:
        group_sizes: int32 [E].
        num_rows: of all groups, and of none.
        tile_rows: rows of a tile.
    """
    num_groups = group_sizes.shape[0]
    sizes = jnp.append(group_sizes, num_rows - group_sizes.sum()).astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    aligned = (ends - sizes) // ALIGNED * ALIGNED
    tiles_per_group = jnp.where(sizes > 0, (ends - aligned + tile_rows - 1) // tile_rows, 0)
    tile_ends = jnp.cumsum(tiles_per_group)
    most = (num_rows + (num_groups + 1) * (tile_rows + ALIGNED)) // tile_rows
    tiles = jnp.arange(most)
    groups = jnp.minimum(jnp.searchsorted(tile_ends, tiles, side="right"), num_groups)
    rank = tiles - (tile_ends - tiles_per_group)[groups]  # of the tile within its group
    starts = aligned[groups] + rank * tile_rows
    firsts = jnp.maximum((ends - sizes)[groups] - starts, 0)
    lasts = jnp.minimum(ends[groups] - starts, tile_rows)
    fields = groups, starts, firsts, lasts, tile_ends[-1:]
    return RowPlan(*(field.astype(jnp.int32) for field in fields))


def loadable_rows(num_rows: int, tile_rows: int) -> int:
    """Rows that an array must have, with those appended, for its last tile to be loaded."""
    if _knows_layouts():
        return round_up(max(num_rows, tile_rows), ALIGNED)
    return num_rows + tile_rows  # the interpreter of jax 0.10 refuses to read past the end


def pad_to(array: jax.Array, **sizes: int) -> jax.Array:
    """Append zeros to the dimensions `d0`, `d1`, ... until they have at least these sizes."""
    missing = [max(sizes.get(f"d{d}", 0) - size, 0) for d, size in enumerate(array.shape)]
    if not any(missing):
        return array
    return jnp.pad(array, [(0, width) for width in missing])


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def fitting_width(total: int, limit: int, least: int = 64) -> int:
    """The largest of 256, 128 and 64 that divides `total` within limits, or else `least`."""
    return next((w for w in (256, 128, 64) if least <= w <= limit and total % w == 0), least)


def matrix_in_smem(shape: tuple[int, ...], dtype, columns: int | None = None) -> plgpu.SMEM:
    """Shared memory whose last two dimensions are laid out for wgmma and copies by hardware.

    Args:
        shape: of the buffers.
        dtype: of the elements.
        columns: how many are accessed at once; None for all.
    """
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle((columns or shape[-1]) * size * 8)
    transforms = (
        plgpu.TilingTransform((8, swizzle // size)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def kernel(body, cost_estimate: pl.CostEstimate, **arguments):
    """`plgpu.kernel` with a cost estimate where this version of jax takes one."""
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        arguments["cost_estimate"] = cost_estimate
    return plgpu.kernel(body, compiler_params=PARAMS, **arguments)


def store_untiled(ref, value: jax.Array) -> None:
    """Store in plain order; jax 0.12 wants to be told that banks of the memory may conflict."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def loop(count: jax.Array, step, first=0) -> None:
    """Call `step(i)` for i from `first` on below `count`."""
    lax.fori_loop(first, count, lambda i, _: step(i), None)


def share_of_block(num_items: jax.Array, num_blocks: int) -> jax.Array:
    """How many of the items this block computes, which take them in turns."""
    block = lax.axis_index("block")
    return lax.div(num_items - block + (num_blocks - 1), jnp.int32(num_blocks))


class Ring:
    """Buffers in shared memory that one warpgroup fills and others read, in turns.

    Attributes:
        num_slots: how many there are.
        full: barriers, completed when the copies into a slot have arrived.
        empty: barriers, completed when all consumers have read a slot.
    """

    def __init__(self, num_slots: int, full, empty):
        self.num_slots = num_slots
        self.full = full
        self.empty = empty

    def slot(self, step: jax.Array) -> jax.Array:
        """The buffer of the step, counted from the beginning of the kernel."""
        return lax.rem(step, jnp.int32(self.num_slots))

    def wait_empty(self, step: jax.Array) -> jax.Array:
        """Wait until the buffer of the step may be filled, and return its slot."""
        slot = self.slot(step)

        @pl.when(step >= self.num_slots)
        def _():
            plgpu.barrier_wait(self.empty.at[slot])

        return slot

    def wait_full(self, step: jax.Array) -> jax.Array:
        """Wait until the buffer of the step is filled, and return its slot."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def release(self, step: jax.Array) -> None:
        """Let the buffer of the step be filled again."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def drain(self, num_steps: jax.Array) -> None:
        """Wait, after the last step, until nothing is read any more."""
        last = jnp.minimum(num_steps, self.num_slots)
        loop(last, lambda i: plgpu.barrier_wait(self.empty.at[self.slot(num_steps - last + i)]))


def multiply_steps(ring: Ring, first_step: jax.Array, num_steps: jax.Array, products) -> None:
    """Multiply the buffers of consecutive steps; each is released while the next is multiplied.

    Args:
        ring: of the buffers.
        first_step: counted from the beginning of the kernel.
        num_steps: how many.
        products: (step, slot) -> issues the products of one buffer.
    """

    def step(i):
        products(first_step + i, ring.wait_full(first_step + i))
        plgpu.wgmma_wait(1)

        @pl.when(i > 0)
        def _():
            ring.release(first_step + i - 1)

    loop(num_steps, step)
    plgpu.wgmma_wait(0)

    @pl.when(num_steps > 0)
    def _():
        ring.release(first_step + num_steps - 1)


# How bytes lie in registers so that 16-bit numbers made of them can be stored for wgmma.
_BYTES = plgpu.Layout.WGMMA_UPCAST_2X


def _knows_layouts() -> bool:
    """Whether loads with a layout can be traced here: not by the interpreter of jax 0.10."""
    return interpreted_platform() is None or hasattr(plgpu, "store")


def load_tiled(ref) -> jax.Array:
    """Load bytes [R, C] from shared memory."""
    if not _knows_layouts():
        return ref[...]
    if hasattr(plgpu, "store"):
        return plgpu.load(ref, layout=_BYTES, optimized=False)
    return plgpu.load(ref, (), layout=_BYTES, optimized=False)


def load_vector(ref) -> jax.Array:
    """Load bytes [R], one for each row of what `load_tiled` returns."""
    if not _knows_layouts():
        return ref[...]
    if hasattr(plgpu, "store"):
        return plgpu.load(ref, layout=_BYTES.reduce(1), optimized=False)
    return plgpu.load(ref, (), layout=_BYTES.reduce(1), optimized=False)


def column_numbers(shape: tuple[int, int]) -> jax.Array:
    """The column of each element of what `load_tiled` returns, int32."""
    if not _knows_layouts():
        return lax.broadcasted_iota(jnp.int32, shape, 1)
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_BYTES)


def across_columns(vector: jax.Array, num_columns: int) -> jax.Array:
    """[R] -> [R, C], as `load_tiled` returns."""
    matrix = lax.broadcast_in_dim(vector, (*vector.shape, num_columns), (0,))
    return plgpu.layout_cast(matrix, _BYTES) if _knows_layouts() else matrix
