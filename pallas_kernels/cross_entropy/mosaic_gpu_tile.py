"""What the Hopper kernels of the cross entropy share: sizes, the ring of buffers, the product."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Tokens of a warpgroup (those of one wgmma), warpgroups that multiply, width of a buffer.
ROWS, GROUPS, DEPTH = 64, 2, 64
TOKENS = ROWS * GROUPS


@dataclasses.dataclass(frozen=True)
class CrossEntropyGPUTiles:
    """Tile of the logits, and how it is computed.

    Attributes:
        columns: of a tile, at most 256; at most 128 for float32 operands.
        stages: buffers of the ring, at least 2: one is released while the next is multiplied.
        blocks: of threads that run at one time: the vocabulary is shared out to reach it.
        chunk: logits M * columns whose gradient is in memory at a time (backward).
    """

    columns: int = 256
    stages: int = 4
    blocks: int = 132
    chunk: int = 1 << 26


@dataclasses.dataclass(frozen=True)
class Plan:
    """A call for x [M, D] and weight [D, W], filled to whole tiles; hashable."""

    num_tokens: int
    width: int
    vocabulary: int
    filled: int  # W in whole tiles
    dtype: jnp.dtype
    columns: int
    stages: int
    shares: int  # blocks of threads that share out the vocabulary of the same tokens

    @property
    def num_products(self) -> int:
        """Of parts of the operands."""
        return 6 if self.dtype == jnp.float32 else 1

    @property
    def steps(self) -> int:
        """Buffers of one tile."""
        return self.num_products * self.width // DEPTH

    def places(self, step) -> tuple[jax.Array, jax.Array]:
        """First columns of x and rows of the weight that a step multiplies."""
        steps = self.width // DEPTH
        if self.num_products == 1:
            return step * DEPTH, step * DEPTH
        number, within = lax.div(step, steps), lax.rem(step, steps) * DEPTH
        # (x's part, the weight's): (2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)
        is_both = number == 1
        x_part = jnp.where(number == 0, 2, jnp.where(is_both | (number == 3), 1, 0))
        weight_part = jnp.where(number == 2, 2, jnp.where(is_both | (number == 4), 1, 0))
        return x_part * self.width + within, weight_part * self.width + within

    def scratch(self) -> dict:
        """Ring, targets and their barriers."""
        return {
            "x": plgpu.SMEM((self.stages, TOKENS, DEPTH), jnp.bfloat16),
            "weight": plgpu.SMEM((self.stages, DEPTH, self.columns), jnp.bfloat16),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            "empty": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=self.stages),
            "target": plgpu.SMEM((GROUPS, ROWS), jnp.int32),
        }

    def call(self, kernel, name: str, row_bytes: int, out_type, num_columns: int, scratch: dict):
        """The Pallas call of a kernel that moves `row_bytes` per token beside x and the weight.

        `num_columns` numbers per token arrive at the barrier "rows_full" of each warpgroup.
        """
        rows_full = plgpu.Barrier(num_arrivals=num_columns, num_barriers=GROUPS)
        arguments = {}
        if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
            bytes_of_parts = 6 if self.dtype == jnp.float32 else 2
            operands = (self.num_tokens + self.filled) * self.width * bytes_of_parts
            arguments["cost_estimate"] = pl.CostEstimate(
                flops=2 * self.num_tokens * self.width * self.filled * self.num_products,
                transcendentals=self.num_tokens * self.filled,
                bytes_accessed=operands + self.num_tokens * row_bytes,
            )
        return plgpu.kernel(
            functools.partial(kernel, self),
            out_type=out_type,
            scratch_types=self.scratch() | {"rows_full": rows_full} | scratch,
            grid=(self.num_tokens // TOKENS, self.shares),
            grid_names=("tokens", "share"),
            num_threads=GROUPS + 1,
            thread_name="group",
            compiler_params=plgpu.CompilerParams(
                approx_math=self.dtype == jnp.bfloat16,
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            ),
            kernel_name=name,
            **arguments,
        )


def make_plan(x: jax.Array, weight: jax.Array, tiles: CrossEntropyGPUTiles) -> Plan:
    """For x in whole tiles; the weight need not be."""
    vocabulary = weight.shape[1]
    columns = tiles.columns if x.dtype == jnp.bfloat16 else min(tiles.columns, 128)
    while columns > 64 and vocabulary % columns:
        columns //= 2
    filled = pl.cdiv(vocabulary, columns) * columns
    shares = max(1, min(tiles.blocks // (len(x) // TOKENS), filled // columns))
    return Plan(*x.shape, vocabulary, filled, x.dtype, columns, tiles.stages, shares)


def fill(array: jax.Array, size: int, axis: int) -> jax.Array:
    """Append zeros; copies move whole tiles."""
    missing = size - array.shape[axis]
    if not missing:
        return array
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, missing)
    return jnp.pad(array, padding)


def in_parts(array: jax.Array, axis: int) -> jax.Array:
    """A bfloat16 array itself; of float32 three bfloat16 arrays that add up to it, along `axis`."""
    if array.dtype == jnp.bfloat16:
        return array
    parts = []
    for _ in range(3):  # a cast there and back would be optimised away
        parts.append(lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7))
        array = array - parts[-1]
    return jnp.concatenate(parts, axis).astype(jnp.bfloat16)


def over_columns(vector: jax.Array, plan: Plan) -> jax.Array:
    """A number per token, repeated along the columns of a tile."""
    return lax.broadcast_in_dim(vector, (ROWS, plan.columns), (0,))


def _num_tiles(plan: Plan) -> jax.Array:
    """Of this block."""
    others_first = plan.filled // plan.columns - lax.axis_index("share") + (plan.shares - 1)
    return lax.div(others_first, jnp.int32(plan.shares))


def over_tiles(plan: Plan, visit, carry):
    """`carry = visit(tile, first step, carry)` over this block's tiles of the vocabulary."""
    share, count = lax.axis_index("share"), _num_tiles(plan)
    return lax.fori_loop(
        0, count, lambda i, c: visit(share + i * plan.shares, i * plan.steps, c), carry
    )


def _fetch(plan: Plan, x_ref, weight_ref, scratch) -> None:
    """Fill the ring, tile after tile, and wait until all of it has been read."""
    tokens = pl.ds(lax.axis_index("tokens") * TOKENS, TOKENS)

    def fetch_tile(tile, first_step, _):
        columns = pl.ds(tile * plan.columns, plan.columns)

        def fetch(k, _):
            step = first_step + k
            slot = lax.rem(step, jnp.int32(plan.stages))

            @pl.when(step >= plan.stages)
            def _():
                plgpu.barrier_wait(scratch["empty"].at[slot])

            column, row = (pl.ds(place, DEPTH) for place in plan.places(k))
            full = scratch["full"].at[slot]
            plgpu.copy_gmem_to_smem(x_ref.at[tokens, column], scratch["x"].at[slot], full)
            plgpu.copy_gmem_to_smem(weight_ref.at[row, columns], scratch["weight"].at[slot], full)

        lax.fori_loop(0, plan.steps, fetch, None)

    over_tiles(plan, fetch_tile, None)
    num_steps = _num_tiles(plan) * plan.steps

    def drain(step, _):
        plgpu.barrier_wait(scratch["empty"].at[lax.rem(step, jnp.int32(plan.stages))])

    lax.fori_loop(jnp.maximum(num_steps - plan.stages, 0), num_steps, drain, None)


def tile_logits(plan: Plan, first_step, scratch) -> jax.Array:
    """Logits [64, columns] float32 of the next tile; buffers are released one step late."""
    own = pl.ds(lax.axis_index("group") * ROWS, ROWS)

    def multiply(total):
        def step(k, _):
            slot = lax.rem(first_step + k, jnp.int32(plan.stages))
            plgpu.barrier_wait(scratch["full"].at[slot])
            plgpu.wgmma(total, scratch["x"].at[slot, own], scratch["weight"].at[slot])
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _():
                before = lax.rem(first_step + k - 1, jnp.int32(plan.stages))
                plgpu.barrier_arrive(scratch["empty"].at[before])

        lax.fori_loop(0, plan.steps, step, None)
        plgpu.wgmma_wait(0)
        last = lax.rem(first_step + (plan.steps - 1), jnp.int32(plan.stages))
        plgpu.barrier_arrive(scratch["empty"].at[last])
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, plan.columns), jnp.float32))


def share_work(plan: Plan, x_ref, weight_ref, scratch, consume) -> None:
    """One warpgroup fetches, the others call `consume(group, own rows of the arrays)`."""
    group = lax.axis_index("group")

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _fetch(plan, x_ref, weight_ref, scratch)

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        consume(group, pl.ds(lax.axis_index("tokens") * TOKENS + group * ROWS, ROWS))
