"""Hopper kernels: logits in the registers of two warpgroups, reduced or turned into their gradient.

A block of threads keeps 128 tokens and takes one tile of the vocabulary after another. One
warpgroup copies blocks of x and of the weight into a ring of buffers; the others multiply, 64
tokens each, and read their logits while the ring fills for the next tile. Blocks that run at one
time want the same columns of the weight, which then come from the L2 cache.

Float32 operands are sums of three bfloat16 numbers. The parts stand side by side along the width,
and the six products of parts that matter are added up, the smallest first.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.checks import align_varying
from pallas_kernels.cross_entropy.gradients import add_up_gradients, chunk_columns
from pallas_kernels.tiles import choose_tiles

# Tokens of a warpgroup (those of one wgmma), warpgroups that multiply, width of a buffer.
ROWS, GROUPS, DEPTH = 64, 2, 64
TOKENS = ROWS * GROUPS
# Columns past the end of the vocabulary: far below any peak, which starts at _START.
_ABSENT, _START = -3e38, -1e38


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
class _Plan:
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


def unsupported(x: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernels do not take these operands, or None."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x has dtype {x.dtype}; float32 and bfloat16 are supported"
    if weight.shape[0] % DEPTH:
        return f"D={weight.shape[0]} of x is not a multiple of {DEPTH}"
    if x.shape[0] == 0:
        return "x has no tokens (M=0)"
    return None


def _plan(x: jax.Array, weight: jax.Array, tiles: CrossEntropyGPUTiles) -> _Plan:
    """For x in whole tiles; the weight need not be."""
    vocabulary = weight.shape[1]
    columns = tiles.columns if x.dtype == jnp.bfloat16 else min(tiles.columns, 128)
    while columns > 64 and vocabulary % columns:
        columns //= 2
    filled = pl.cdiv(vocabulary, columns) * columns
    shares = max(1, min(tiles.blocks // (len(x) // TOKENS), filled // columns))
    return _Plan(*x.shape, vocabulary, filled, x.dtype, columns, tiles.stages, shares)


def _fill(array: jax.Array, size: int, axis: int) -> jax.Array:
    """Append zeros; copies move whole tiles."""
    missing = size - array.shape[axis]
    if not missing:
        return array
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, missing)
    return jnp.pad(array, padding)


def _parts(array: jax.Array, axis: int) -> jax.Array:
    """A bfloat16 array itself; of float32 three bfloat16 arrays that add up to it, along `axis`."""
    if array.dtype == jnp.bfloat16:
        return array
    parts = []
    for _ in range(3):  # a cast there and back would be optimised away
        parts.append(lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7))
        array = array - parts[-1]
    return jnp.concatenate(parts, axis).astype(jnp.bfloat16)


def _rows(vector: jax.Array, plan: _Plan) -> jax.Array:
    """A number per token, repeated along the columns of a tile."""
    return lax.broadcast_in_dim(vector, (ROWS, plan.columns), (0,))


def _num_tiles(plan: _Plan) -> jax.Array:
    """Of this block."""
    others_first = plan.filled // plan.columns - lax.axis_index("share") + (plan.shares - 1)
    return lax.div(others_first, jnp.int32(plan.shares))


def _over_tiles(plan: _Plan, visit, carry):
    """`carry = visit(tile, first step, carry)` over this block's tiles of the vocabulary."""
    share, count = lax.axis_index("share"), _num_tiles(plan)
    return lax.fori_loop(
        0, count, lambda i, c: visit(share + i * plan.shares, i * plan.steps, c), carry
    )


def _fetch(plan: _Plan, x_ref, weight_ref, scratch) -> None:
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

    _over_tiles(plan, fetch_tile, None)
    num_steps = _num_tiles(plan) * plan.steps

    def drain(step, _):
        plgpu.barrier_wait(scratch["empty"].at[lax.rem(step, jnp.int32(plan.stages))])

    lax.fori_loop(jnp.maximum(num_steps - plan.stages, 0), num_steps, drain, None)


def _logits(plan: _Plan, first_step, scratch) -> jax.Array:
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


def _work(plan: _Plan, x_ref, weight_ref, scratch, consume) -> None:
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


def _forward_kernel(
    plan: _Plan, target_ref, x_ref, weight_ref, peak_ref, total_ref, chosen_ref, **scratch
):
    def consume(group, own):
        full = scratch["rows_full"].at[group]
        plgpu.copy_gmem_to_smem(target_ref.at[own], scratch["target"].at[group], full)
        plgpu.barrier_wait(full)
        target = scratch["target"][group]

        def reduce(tile, first_step, running):
            peak, total, chosen = running
            logits = _logits(plan, first_step, scratch)
            column = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            if plan.filled != plan.vocabulary:
                absent = column >= plan.vocabulary - tile * plan.columns
                logits = lax.select(absent, jnp.full_like(logits, _ABSENT), logits)
            is_target = column == _rows(target - tile * plan.columns, plan)
            picked = lax.select(is_target, logits, jnp.zeros_like(logits))
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
            powers = jnp.exp(logits - _rows(new_peak, plan))
            total = total * jnp.exp(peak - new_peak) + jnp.sum(powers, axis=1)
            return new_peak, total, chosen + jnp.sum(picked, axis=1)

        zero = jnp.zeros((ROWS,), jnp.float32)
        running = _over_tiles(plan, reduce, (jnp.full_like(zero, _START), zero, zero))
        share = lax.axis_index("share")
        for n, (value, ref) in enumerate(zip(running, (peak_ref, total_ref, chosen_ref))):
            scratch["out"][n, group] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch["out"].at[n, group], ref.at[share, own])
        plgpu.wait_smem_to_gmem(0)

    _work(plan, x_ref, weight_ref, scratch, consume)


def _d_logits_kernel(plan: _Plan, target_ref, terms_ref, x_ref, weight_ref, out_ref, **scratch):
    def consume(group, own):
        full = scratch["rows_full"].at[group]
        plgpu.copy_gmem_to_smem(target_ref.at[own], scratch["target"].at[group], full)
        for n in range(3):
            plgpu.copy_gmem_to_smem(terms_ref.at[n, own], scratch["terms"].at[n, group], full)
        plgpu.barrier_wait(full)
        target = scratch["target"][group]
        logsumexp, d_logsumexp, d_chosen = (scratch["terms"][n, group] for n in range(3))

        def turn(tile, first_step, _):
            logits = _logits(plan, first_step, scratch)
            column = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
            is_target = column == _rows(target - tile * plan.columns, plan)
            d = jnp.exp(logits - _rows(logsumexp, plan)) * _rows(d_logsumexp, plan)
            d += lax.select(is_target, _rows(d_chosen, plan), jnp.zeros_like(d))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scratch["out"][group] = d.astype(out_ref.dtype)
            plgpu.commit_smem()
            columns = pl.ds(tile * plan.columns, plan.columns)
            plgpu.copy_smem_to_gmem(scratch["out"].at[group], out_ref.at[own, columns])

        _over_tiles(plan, turn, None)
        plgpu.wait_smem_to_gmem(0)

    _work(plan, x_ref, weight_ref, scratch, consume)


def _reduced(x, weight, targets, tiles) -> tuple[jax.Array, jax.Array]:
    """Logsumexp and target logit [M] in one pass over the vocabulary."""
    plan = _plan(x, weight, tiles)
    parts = jax.ShapeDtypeStruct((plan.shares, len(x)), jnp.float32)
    kernel = plan.call(
        _forward_kernel,
        "cross_entropy_forward",
        row_bytes=4 + 3 * 4 * plan.shares,
        out_type=[parts] * 3,
        num_columns=1,
        scratch={"out": plgpu.SMEM((3, GROUPS, ROWS), jnp.float32)},
    )
    peak, total, chosen = kernel(targets, _parts(x, 1), _parts(_fill(weight, plan.filled, 1), 0))
    highest = jnp.max(peak, axis=0)
    total = jnp.sum(total * jnp.exp(peak - highest), axis=0)
    return highest + jnp.log(total), jnp.sum(chosen, axis=0)


def _d_logits(x, part, targets, terms, tiles) -> jax.Array:
    """Gradient [M, columns] of the logits x @ part, in x's dtype.

    Terms are the rows' logsumexp, its gradient and that of the target's logit [3, M].
    """
    tiles = dataclasses.replace(tiles, stages=min(tiles.stages, 3))  # room for the tile to store
    plan = _plan(x, part, tiles)
    kernel = plan.call(
        _d_logits_kernel,
        "cross_entropy_d_logits",
        row_bytes=16 + x.dtype.itemsize * plan.filled,
        out_type=jax.ShapeDtypeStruct((len(x), plan.filled), x.dtype),
        num_columns=4,
        scratch={
            "out": plgpu.SMEM((GROUPS, ROWS, plan.columns), x.dtype),
            "terms": plgpu.SMEM((3, GROUPS, ROWS), jnp.float32),
        },
    )
    part_of_weight = _parts(_fill(part, plan.filled, 1), 0)
    return kernel(targets, terms, _parts(x, 1), part_of_weight)[:, : part.shape[1]]


def logit_terms(x: jax.Array, weight: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.cross_entropy.logit_terms`."""
    num_tokens, filled = len(x), pl.cdiv(len(x), TOKENS) * TOKENS
    x, targets = _fill(x, filled, 0), _fill(targets, filled, 0)
    logsumexp, chosen = _terms(*align_varying(x, weight, targets))
    return logsumexp[:num_tokens], chosen[:num_tokens]


@jax.custom_vjp
def _terms(x, weight, targets):
    return _forward(x, weight, targets)[0]


def _forward(x, weight, targets):
    tiles = choose_tiles("cross_entropy_gpu", CrossEntropyGPUTiles())
    logsumexp, chosen = _reduced(x, weight, targets, tiles)
    return (logsumexp, chosen), (x, weight, targets, logsumexp)


def _backward(residuals, cotangents):
    x, weight, targets, logsumexp = residuals
    tiles = choose_tiles("cross_entropy_gpu", CrossEntropyGPUTiles())
    terms = jnp.stack([logsumexp, *cotangents])

    def d_logits(start, part):
        return _d_logits(x, part, targets - start, terms, tiles)

    columns = chunk_columns(len(x), weight.shape[1], tiles.chunk)
    return *add_up_gradients(x, weight, columns, d_logits), None


_terms.defvjp(_forward, _backward)
