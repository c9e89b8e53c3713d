"""The part of KDA that the state runs through: one chunk after another, for every head.

Per chunk, with what `mosaic_gpu_prepare` gives::

    x          = v - k_start S
    correction = x - solve (beta x)
    output     = q_start S + score_q (beta correction)
    S'         = exp(total) S + k_end^T (beta correction)

A program holds 64 value channels of one head's state in registers, in blocks of 64 key channels.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_cost as cost
from pallas_kernels.kda.mosaic_gpu_prepare import Prepared
from pallas_kernels.kda.mosaic_gpu_tiles import BLOCK, CHUNK, multiply, over_rows, transposed

_BF16, _F32 = jnp.bfloat16, jnp.float32


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
        "k_blocks": blocks(num_blocks),
        "v_block": blocks(),
        "beta_row": plgpu.SMEM((CHUNK,), _F32),
        "first": plgpu.Barrier(num_arrivals=num_blocks + 2),
        "solve_block": blocks(),
        "q_blocks": blocks(num_blocks),
        "score_block": blocks(),
        "second": plgpu.Barrier(num_arrivals=num_blocks + 2),
        "end_blocks": blocks(num_blocks),
        "total_rows": plgpu.SMEM((num_blocks, BLOCK), _F32),
        "third": plgpu.Barrier(num_arrivals=2 * num_blocks),
        "state_blocks": blocks(num_blocks),
        "x_block": blocks(),
        "update_block": blocks(),
        "output_block": blocks(),
        "exchange": plgpu.SMEM((BLOCK, BLOCK), _F32),
        "exchanged": plgpu.Barrier(num_arrivals=1),
    }
    if keep:
        results.append(jax.ShapeDtypeStruct((*per_chunk, key_dim, value_dim), _BF16))
        results.append(jax.ShapeDtypeStruct((*per_chunk, CHUNK, value_dim), _BF16))
        scratch["correction_block"] = blocks()
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
    *, k_blocks, v_block, beta_row, first, solve_block, q_blocks, score_block, second, end_blocks,
    total_rows, third, state_blocks, x_block, update_block, output_block, exchange, exchanged,
    correction_block=None,
):  # fmt: skip
    row, head, values = (lax.axis_index(name) for name in ("row", "head", "values"))
    channels = pl.ds(values * BLOCK, BLOCK)
    num_chunks, num_blocks = prepared.solve.shape[2], k_blocks.shape[0]
    keys = [pl.ds(index * BLOCK, BLOCK) for index in range(num_blocks)]

    def tokens(chunk):
        return pl.ds(chunk * CHUNK, CHUNK)

    def by_block(source, chunk, target):
        return ((source.at[row, head, chunk, :, keys[i]], target.at[i]) for i in range(num_blocks))

    def start_first(chunk):
        copy(first, *by_block(prepared.k_start, chunk, k_blocks))
        copy(first, (v.at[row, tokens(chunk), head, channels], v_block))
        copy(first, (beta.at[row, head, tokens(chunk)], beta_row))

    def start_second(chunk):
        copy(second, (prepared.solve.at[row, head, chunk], solve_block))
        copy(second, *by_block(prepared.q_start, chunk, q_blocks))
        copy(second, (prepared.score_q.at[row, head, chunk], score_block))

    def start_third(chunk):
        copy(third, *by_block(prepared.k_end, chunk, end_blocks))
        totals = prepared.total
        copy(third, *((totals.at[row, head, chunk, keys[i]], total_rows.at[i])
                      for i in range(num_blocks)))  # fmt: skip

    def step(chunk, state):
        following = chunk + 1
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
            state_blocks[index] = state[index].astype(_BF16)
        plgpu.commit_smem()
        if states is not None:
            for index in range(num_blocks):
                plgpu.copy_smem_to_gmem(
                    state_blocks.at[index], states.at[row, head, chunk, keys[index], channels]
                )
        plgpu.barrier_wait(first)
        beta_rows = over_rows(beta_row[...])
        x = v_block[...].astype(_F32) - multiply(
            *((k_blocks.at[i], state_blocks.at[i]) for i in range(num_blocks))
        )
        x_block[...] = (beta_rows * x).astype(_BF16)
        plgpu.commit_smem()
        pl.when(following < num_chunks)(lambda: start_first(following))
        plgpu.barrier_wait(second)
        correction = x - multiply((solve_block, x_block))
        update_block[...] = (beta_rows * correction).astype(_BF16)
        if corrections is not None:
            correction_block[...] = correction.astype(_BF16)
        plgpu.commit_smem()
        result = multiply(
            *((q_blocks.at[i], state_blocks.at[i]) for i in range(num_blocks)),
            (score_block, update_block),
        )
        output_block[...] = result.astype(_BF16)
        plgpu.barrier_wait(third)
        state = tuple(
            over_rows(jnp.exp(total_rows[i])) * state[i]
            + multiply((transposed(end_blocks.at[i]), update_block))
            for i in range(num_blocks)
        )
        plgpu.commit_smem()
        pl.when(following < num_chunks)(lambda: start_second(following))
        pl.when(following < num_chunks)(lambda: start_third(following))
        plgpu.copy_smem_to_gmem(output_block, output.at[row, tokens(chunk), head, channels])
        if corrections is not None:
            plgpu.copy_smem_to_gmem(correction_block, corrections.at[row, head, chunk, :, channels])

        @pl.when(closes_run(runs, row, chunk, num_chunks))
        def _():
            store_state(
                state, final_state.at[row, run_of(runs, row, chunk), head, :, channels], exchange
            )

        return state

    start_first(0)
    start_second(0)
    start_third(0)
    zeros = tuple(lax.full((BLOCK, BLOCK), 0.0, _F32) for _ in range(num_blocks))
    lax.fori_loop(0, num_chunks, step, zeros)
    plgpu.wait_smem_to_gmem(0)
