"""The part of KDA that the state runs through: one chunk after another, for every head.

Per chunk, with what `mosaic_gpu_prepare` gives::

    x          = v - k_start S
    correction = x - solve (beta x)
    output     = q_start S + score_q (beta correction)
    S'         = exp(total) S + k_end^T (beta correction)

`solve (beta x)` is multiplied in two bfloat16 parts of either factor, `k_end` comes in two
(`mosaic_gpu_prepare`). A program holds 64 value channels of one head's state in registers, in
blocks of 64 key channels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_cost as cost
from pallas_kernels.kda import mosaic_gpu_tiles as tiles
from pallas_kernels.kda.mosaic_gpu_prepare import Prepared
from pallas_kernels.kda.mosaic_gpu_tiles import (
    BLOCK,
    CHUNK,
    fine_pairs,
    multiply,
    over_rows,
    split,
    transposed,
)

_BF16, _F32 = jnp.bfloat16, jnp.float32


class _Blocks(NamedTuple):
    """Operands in shared memory, one block or one for each 64 key channels; parts are lists."""

    k_start: list
    q_start: list
    k_end: tuple[list, list]
    state: list
    solve: list
    x: list
    v: Any
    score_q: Any
    update: Any
    output: Any
    correction: Any = None

    @classmethod
    def number(cls, num_blocks, keep):
        """How many there are; the last is only needed when a backward pass follows."""
        return 5 * num_blocks + 8 + int(keep)

    @classmethod
    def of(cls, all_blocks, num_blocks):
        """Name them."""
        lists = [all_blocks[i * num_blocks : (i + 1) * num_blocks] for i in range(5)]
        solve_0, solve_1, x_0, x_1, *others = all_blocks[5 * num_blocks :]
        return cls(
            lists[0], lists[1], (lists[2], lists[3]), lists[4], [solve_0, solve_1], [x_0, x_1],
            *others,
        )  # fmt: skip


def run_states(v, beta, prepared, initial_state, runs, *, keep):
    """Run the kernel.

    Args:
        v: [B, T, H, V] bfloat16, T a multiple of 64, V of 64.
        beta: [B, H, T] float32.
        prepared: what `prepare` returns.
        initial_state: [B, N, H, K, V] float32.
        runs: None where there is one run; else [B, 2, chunks] int32, the run of each chunk, and 1
            where the chunk starts from the initial state of its run.
        keep: whether a backward pass follows.

    Returns:
        output [B, T, H, V] bfloat16 and the state after each run that has chunks [B, N, H, K, V]
        float32; with `keep` also the states before the chunks [B, H, chunks, K, V] and the
        corrections [B, H, chunks, 64, V], bfloat16.
    """
    num_rows, num_tokens, num_heads, value_dim = v.shape
    key_dim = initial_state.shape[-2]
    per_chunk = (num_rows, num_heads, num_tokens // CHUNK)
    num_blocks = key_dim // BLOCK
    results = [jax.ShapeDtypeStruct(v.shape, _BF16)]
    results.append(jax.ShapeDtypeStruct(initial_state.shape, _F32))
    scratch = {
        "operands": blocks(_Blocks.number(num_blocks, keep)),
        "zeros": plgpu.SMEM((2 * CHUNK,), jnp.int32),
        "beta_row": plgpu.SMEM((CHUNK,), _F32),
        "first": plgpu.Barrier(num_arrivals=num_blocks + 2),
        "second": plgpu.Barrier(num_arrivals=num_blocks + 3),
        "total_rows": plgpu.SMEM((num_blocks, BLOCK), _F32),
        "third": plgpu.Barrier(num_arrivals=3 * num_blocks),
        "exchange": plgpu.SMEM((BLOCK, BLOCK), _F32),
        "exchanged": plgpu.Barrier(num_arrivals=1),
    }
    if keep:
        results.append(jax.ShapeDtypeStruct((*per_chunk, key_dim, value_dim), _BF16))
        results.append(jax.ShapeDtypeStruct((*per_chunk, CHUNK, value_dim), _BF16))
    has_runs = runs is not None

    def body(v, beta, *refs, **scratch):
        prepared, initial_state, refs = Prepared(*refs[:6]), refs[6], refs[7:]
        runs, refs = (refs[0], refs[1:]) if has_runs else (None, refs)
        _kernel(v, beta, prepared, initial_state, runs, *refs, **scratch)

    kernel = cost.kernel(
        body, cost.states_cost(v, initial_state, keep=keep),
        out_type=tuple(results), scratch_types=scratch,
        grid=(num_rows, num_heads, value_dim // BLOCK), grid_names=("row", "head", "values"),
        kernel_name="kda_states",
    )  # fmt: skip
    return kernel(v, beta, *prepared, initial_state, *((runs,) if has_runs else ()))


def blocks(number: int | None = None):
    """Shared memory for one block of operands, or several."""
    shape = (CHUNK, BLOCK) if number is None else (number, CHUNK, BLOCK)
    return plgpu.SMEM(shape, _BF16)


def opens_run(runs, row, chunk):
    """Whether a chunk starts from an initial state."""
    return chunk == 0 if runs is None else runs[row, 1, chunk] == 1


def closes_run(runs, row, chunk, num_chunks):
    """Whether a chunk is the last of its run."""
    last = chunk == num_chunks - 1
    if runs is None:
        return last
    return last | (runs[row, 0, jnp.minimum(chunk + 1, num_chunks - 1)] != runs[row, 0, chunk])


def run_of(runs, row, chunk):
    """The run of a chunk."""
    return 0 if runs is None else runs[row, 0, chunk]


def load_state(source, exchange, exchanged):
    """Read a state [K, 64] float32 from main memory, as blocks in registers."""
    # A state on its way to main memory may still be read from there.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    state = []
    for index in range(source.shape[0] // BLOCK):
        # Every warp has read the block before.
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(source.at[pl.ds(index * BLOCK, BLOCK)], exchange, exchanged)
        plgpu.barrier_wait(exchanged)
        state.append(exchange[...])
    return tuple(state)


def store_state(state, target, exchange):
    """Write blocks in registers to main memory."""
    for index, block in enumerate(state):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        exchange[...] = block
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(exchange, target.at[pl.ds(index * BLOCK, BLOCK)])


def copy(barrier, *pairs):
    """Start copies to shared memory."""
    for source, target in pairs:
        plgpu.copy_gmem_to_smem(source, target, barrier)


def _kernel(
    v, beta, prepared, initial_state, runs, output, final_state, states=None, corrections=None,
    *, operands, zeros, beta_row, first, second, total_rows, third, exchange, exchanged,
):  # fmt: skip
    row, head, values = (lax.axis_index(name) for name in ("row", "head", "values"))
    channels = pl.ds(values * BLOCK, BLOCK)
    num_chunks, num_blocks = prepared.solve.shape[2], total_rows.shape[0]
    keys = [pl.ds(index * BLOCK, BLOCK) for index in range(num_blocks)]

    def tokens(chunk):
        return pl.ds(chunk * CHUNK, CHUNK)

    def views():
        return _Blocks.of(tiles.hide(operands, zeros), num_blocks)

    def by_key(source, targets):
        return zip((source.at[:, x] for x in keys), targets, strict=True)

    def start_first(chunk):
        to = views()
        copy(first, *by_key(prepared.k_start.at[row, head, chunk], to.k_start))
        copy(first, (v.at[row, tokens(chunk), head, channels], to.v))
        copy(first, (beta.at[row, head, tokens(chunk)], beta_row))

    def start_second(chunk):
        to = views()
        copy(second, *((prepared.solve.at[row, head, chunk, part], to.solve[part])
                       for part in range(2)))  # fmt: skip
        copy(second, *by_key(prepared.q_start.at[row, head, chunk], to.q_start))
        copy(second, (prepared.score_q.at[row, head, chunk], to.score_q))

    def start_third(chunk):
        to = views()
        for part in range(2):
            copy(third, *by_key(prepared.k_end.at[row, head, chunk, part], to.k_end[part]))
        totals = prepared.total
        copy(third, *((totals.at[row, head, chunk, keys[i]], total_rows.at[i])
                      for i in range(num_blocks)))  # fmt: skip

    def step(chunk, state):
        following, at = chunk + 1, views()
        state = lax.cond(
            opens_run(runs, row, chunk),
            lambda state: load_state(
                initial_state.at[row, run_of(runs, row, chunk), head, :, channels],
                exchange, exchanged,
            ),
            lambda state: state,
            state,
        )  # fmt: skip
        # The copies to main memory of the step before have read their blocks.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for index in range(num_blocks):
            at.state[index][...] = state[index].astype(_BF16)
        plgpu.commit_smem()
        if states is not None:
            for index in range(num_blocks):
                plgpu.copy_smem_to_gmem(
                    at.state[index], states.at[row, head, chunk, keys[index], channels]
                )
        plgpu.barrier_wait(first)
        beta_rows = over_rows(beta_row[...])
        x = at.v[...].astype(_F32) - multiply(*zip(at.k_start, at.state, strict=True))
        at.x[0][...], at.x[1][...] = split(beta_rows * x)
        plgpu.commit_smem()
        pl.when(following < num_chunks)(lambda: start_first(following))
        plgpu.barrier_wait(second)
        correction = x - multiply(*fine_pairs(at.solve, at.x))
        at.update[...] = (beta_rows * correction).astype(_BF16)
        if corrections is not None:
            at.correction[...] = correction.astype(_BF16)
        plgpu.commit_smem()
        result = multiply(*zip(at.q_start, at.state, strict=True), (at.score_q, at.update))
        at.output[...] = result.astype(_BF16)
        plgpu.barrier_wait(third)
        state = tuple(
            over_rows(jnp.exp(total_rows[i])) * state[i]
            + multiply(*((transposed(part[i]), at.update) for part in at.k_end))
            for i in range(num_blocks)
        )
        plgpu.commit_smem()
        pl.when(following < num_chunks)(lambda: start_second(following))
        pl.when(following < num_chunks)(lambda: start_third(following))
        plgpu.copy_smem_to_gmem(at.output, output.at[row, tokens(chunk), head, channels])
        if corrections is not None:
            plgpu.copy_smem_to_gmem(at.correction, corrections.at[row, head, chunk, :, channels])

        @pl.when(closes_run(runs, row, chunk, num_chunks))
        def _():
            store_state(
                state, final_state.at[row, run_of(runs, row, chunk), head, :, channels], exchange
            )

        return state

    tiles.write_zeros(zeros)
    start_first(0)
    start_second(0)
    start_third(0)
    state = tuple(lax.full((BLOCK, BLOCK), 0.0, _F32) for _ in range(num_blocks))
    lax.fori_loop(0, num_chunks, step, state)
    plgpu.wait_smem_to_gmem(0)
