"""Pieces of the Hopper kernels: products of 64 x 64 blocks, and the decay inside a chunk.

All operands are blocks of 64 x 64 bfloat16 in shared memory, all products float32 accumulators of
one warpgroup. A decay between two tokens is `exp(M g)` with a constant matrix M of 0, 1 and -1: the
product is exact in M, and as precise in g as the bfloat16 parts that g is given in.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interpret import interpreted_platform

# Tokens per chunk, and key or value channels per block: the rows of a wgmma.
CHUNK = BLOCK = 64

# Pairs of blocks of these many rows are split at their border; within 16 rows at the middle row,
# 8 rows of -5 are e^40 on either side, which bfloat16 holds.
SPLITS = (32, 16)
TILE = 16

PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    # exp by the special function unit: a relative error of 1e-7 per unit of the exponent.
    approx_math=True,
)


class _Transposed:
    """A transposed block for the interpreter of jax 0.10, whose wgmma knows none."""

    def __init__(self, ref):
        self.ref = ref
        self.shape = ref.shape[::-1]

    def __getitem__(self, index):
        return lax.transpose(self.ref[index], (1, 0))


def transposed(ref):
    """View a block in shared memory as its transpose, as an operand of `multiply`."""
    if _values_only():
        return _Transposed(ref)
    return ref.transpose((1, 0))


def multiply(*pairs) -> jax.Array:
    """Return the sum of the products of pairs of blocks ([M, 64], [64, N]), float32 [M, N]."""
    if any(isinstance(operand, _Transposed) for pair in pairs for operand in pair):
        product = [
            lax.dot(x[...].astype(jnp.float32), y[...].astype(jnp.float32), precision="highest")
            for x, y in pairs
        ]
        return sum(product[1:], product[0])

    def accumulate(accumulator):
        for x, y in pairs:
            plgpu.wgmma(accumulator, x, y)
        return accumulator[...]

    shape = (pairs[0][0].shape[0], pairs[0][1].shape[1])
    return pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))


def over_rows(vector: jax.Array, shape: tuple[int, int] = (CHUNK, BLOCK)) -> jax.Array:
    """Repeat a value per row [M] along the columns."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def over_columns(vector: jax.Array, shape: tuple[int, int] = (CHUNK, BLOCK)) -> jax.Array:
    """Repeat a value per column [N] along the rows."""
    return lax.broadcast_in_dim(vector, shape, (1,))


def write_zeros(zeros) -> None:
    """Prepare shared memory [128] int32 for `hide`."""
    zeros[...] = lax.full(zeros.shape, 0, jnp.int32)
    plgpu.commit_smem()


def hide(operands, zeros) -> list:
    """Return the blocks of `operands [n, 64, 64]`, their addresses hidden from the compiler.

    In a loop, the addresses and descriptors of blocks are then computed where they are used: kept
    in registers over the whole loop they would leave too few for the values.

    Args:
        operands: blocks in shared memory.
        zeros: what `write_zeros` wrote.
    """
    zero = zeros[0]
    return [operands.at[zero + index] for index in range(operands.shape[0])]


def reciprocal(x: jax.Array) -> jax.Array:
    """Return 1 / x of a positive array within 1e-19 and 1e19.

    As two instructions; a division takes about ten.
    """
    return lax.rsqrt(x * x)


def keep(mask: jax.Array, x: jax.Array) -> jax.Array:
    """Zeros where the mask is false: what is there may be infinite."""
    return lax.select(mask, x, jnp.zeros_like(x))


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two bfloat16 parts whose sum is x to 16 bits."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def fine_pairs(first, second):
    """Return pairs for `multiply` that sum up to the product of factors of two parts each.

    To 16 bits of either factor: the product of both low parts is left out.
    """
    (high, low), (other_high, other_low) = first, second
    return (high, other_high), (high, other_low), (low, other_high)


def _positions() -> tuple[jax.Array, jax.Array]:
    """Row and column numbers of a 64 x 64 block.

    Behind a barrier: the compiler would otherwise keep what masks have in common in registers from
    the first mask to the last.
    """
    numbers = (lax.optimization_barrier(lax.iota(jnp.int32, CHUNK)) for _ in range(2))
    square = (CHUNK, CHUNK)
    return over_rows(next(numbers), square), over_columns(next(numbers), square)


def distance() -> jax.Array:
    """Return t xor s where token s comes before token t, 0 for a token itself, -1 after it.

    Pairs on the two sides of a border of blocks of b rows (the second of a pair of blocks begins
    there) have a distance in [b, 2 b), pairs within a tile one in [1, TILE).
    """
    row, column = _positions()
    after = jnp.full_like(row, -1)
    return lax.select(column <= row, row ^ column, after)


def pairs_at(border: int | jax.Array, distances: jax.Array) -> jax.Array:
    """Mask of pairs (later token, earlier token) on the two sides of a border of blocks."""
    return (distances >= border) & (distances < 2 * border)


def same_run(run, again) -> jax.Array:
    """Mask of pairs of one run, from the number of each token's run [64] in shared memory.

    Given twice: for one array read along rows and along columns jax 0.12 searches minutes for a
    layout.
    """
    square = (CHUNK, CHUNK)
    return over_rows(run[...], square) == over_columns(again[...], square)


def reach_from_start() -> jax.Array:
    """M of the decay from the chunk's start up to and including each token."""
    row, column = _positions()
    return _as_numbers(column <= row)


def reach_to_end() -> jax.Array:
    """M of the decay after each token to the chunk's end."""
    row, column = _positions()
    return _as_numbers(column > row)


def reach_to_border(border: int) -> jax.Array:
    """M of the decay between each token and the border of its pair of blocks."""
    row, column = _positions()
    side = ((row & border) != 0) == (column <= row)
    return _as_numbers(((row ^ column) < border) & side)


def reach_to_middle() -> jax.Array:
    """M of the decay from the middle row of each tile: negative exponents after it, else positive.

    Rows after the middle carry the decay since; rows before it the inverse of the decay to come.
    """
    row, column = _positions()
    middle = row - (row & (TILE - 1)) + (TILE // 2 - 1)
    after = (column <= row) & (column > middle)
    before = (column > row) & (column <= middle)
    return _as_numbers(after) - _as_numbers(before)


def _as_numbers(mask: jax.Array) -> jax.Array:
    ones = jnp.ones(mask.shape, jnp.float32)
    return lax.select(mask, ones, jnp.zeros_like(ones))


def _values_only() -> bool:
    """Whether the interpreter in force reads no transposed operands."""
    return interpreted_platform() == "gpu" and not hasattr(plgpu, "force_gpu_interpret_mode")
