"""Grid and blocks of the TPU kernels: rows, groups of heads, chunks one after another."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.mosaic_tpu_chunk import CHUNK
from pallas_kernels.kda.mosaic_tpu_inputs import MARKS, Options

COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"),
    # Twice the default, a quarter to a half of what the chips have: the matrices of a few heads.
    vmem_limit_bytes=32 * 2**20,
)


class Operands(NamedTuple):
    """Arrays that both kernels read, or blocks of them, in the order of the calls."""

    q: jax.Array  # [B, T, H * K]
    k: jax.Array  # [B, T, H * K]
    v: jax.Array  # [B, T, H * V]
    log_decay: jax.Array  # [B, T, H * K]
    beta: jax.Array  # [B, H / heads, chunks, heads, C]
    gate: jax.Array  # [2, H * K] float32, A_log by channel and biases of raw gates
    marks: jax.Array  # [B, chunks, MARKS, C] float32
    reach: jax.Array  # [R * C, parts * C] bfloat16


class Layout(NamedTuple):
    """Block specs of a call."""

    grid: tuple[int, int, int]
    operands: Operands  # of BlockSpec
    state: pl.BlockSpec  # of the run of the chunk, [B, N, H, V, K]
    kept: pl.BlockSpec  # state before the chunk, [B, H, chunks, V, K]
    gate_sums: pl.BlockSpec  # [B, 2, H * K]
    whole: pl.BlockSpec  # a constant matrix


def make_layout(options: Options, num_rows: int, num_heads: int, *, backward: bool) -> Layout:
    """Return the blocks; the backward kernel walks the chunks from the last to the first."""
    heads, num_chunks = options.heads, options.num_chunks

    def spec(shape, index):
        def index_map(b, h, step, *runs):
            return index(b, h, num_chunks - 1 - step if backward else step, *runs)

        return pl.BlockSpec(shape, index_map)

    def tokens(dim):
        return spec((1, CHUNK, heads * dim), lambda b, h, c, *_: (b, c, h))

    def slot(b, c, runs):
        return Runs(*runs).slot[b, c] if runs else 0

    keys, state = tokens(options.key_dim), (options.value_dim, options.key_dim)
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    return Layout(
        grid=(num_rows, num_heads // heads, num_chunks),
        operands=Operands(
            q=keys,
            k=keys,
            v=tokens(options.value_dim),
            log_decay=keys,
            beta=spec((1, 1, 1, heads, CHUNK), lambda b, h, c, *_: (b, h, c, 0, 0)),
            gate=spec((2, heads * options.key_dim), lambda b, h, c, *_: (0, h)),
            marks=spec(
                (1, 1, MARKS, CHUNK),
                lambda b, h, c, *_: (b, c, 0, 0) if options.marked else (0, 0, 0, 0),
            ),
            reach=whole,
        ),
        state=spec((1, 1, heads, *state), lambda b, h, c, *runs: (b, slot(b, c, runs), h, 0, 0)),
        kept=spec((1, heads, 1, *state), lambda b, h, c, *_: (b, h, c, 0, 0)),
        gate_sums=spec((1, 2, heads * options.key_dim), lambda b, h, c, *_: (b, 0, h)),
        whole=whole,
    )  # fmt: skip


class Runs(NamedTuple):
    """Scalars of runs laid out on chunk boundaries, [B, chunks] int32."""

    slot: jax.Array  # the run of the chunk
    fresh: jax.Array  # 1 where the chunk starts from the initial state of its run


def opens_run(runs: tuple, row: jax.Array, chunk: jax.Array) -> jax.Array:
    """Whether a chunk starts from an initial state."""
    return Runs(*runs).fresh[row, chunk] == 1 if runs else chunk == 0


def closes_run(runs: tuple, row: jax.Array, chunk: jax.Array, num_chunks: int) -> jax.Array:
    """Whether a chunk is the last of its run."""
    last = chunk == num_chunks - 1
    if runs:
        slot = Runs(*runs).slot
        last |= slot[row, chunk] != slot[row, jnp.minimum(chunk + 1, num_chunks - 1)]
    return last


def num_bytes(arrays) -> int:
    """Bytes of arrays or of their shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def operand_bytes(layout: Layout, arrays: Operands) -> int:
    """Traffic of the operands: what does not change from step to step is not read again."""
    num_rows, num_groups, _ = layout.grid
    rereads_marks = arrays.marks.shape[1] > 1
    again = (num_groups - 1 if rereads_marks else 0) * num_bytes(arrays.marks)
    again += (num_rows - 1 if num_groups > 1 else 0) * num_bytes(arrays.gate)
    return num_bytes(arrays) + again
