"""The gradient of `mosaic_gpu_states`: the gradient of the state runs from the last chunk back.

Per chunk, with dS' the gradient of the state after it::

    d_update = score_q^T d_output + k_end dS'          of beta correction
    d_solved = d_update - solve^T (beta d_update)
    d_v      = beta d_solved                           (also of -k_start S)
    d_beta   = sum_v d_solved correction
    dS       = exp(total) dS' + q_start^T d_output - k_start^T d_v

`k_end dS'` and `solve^T (beta d_update)` are multiplied in two bfloat16 parts of either factor:
what they are added to may cancel them (`mosaic_gpu_prepare`). A program holds 64 value channels of
one head's dS in registers.
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
from pallas_kernels.kda.mosaic_gpu_states import (
    blocks,
    closes_run,
    copy,
    load_state,
    opens_run,
    run_of,
    store_state,
)
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

    k_end: tuple[list, list]
    q_start: list
    k_start: list
    d_state: tuple[list, list]
    solve: list
    d_update: list
    d_output: Any
    score_q: Any
    correction: Any
    d_v: Any

    @classmethod
    def number(cls, num_blocks):
        """How many there are."""
        return 6 * num_blocks + 8

    @classmethod
    def of(cls, all_blocks, num_blocks):
        """Name them."""
        lists = [all_blocks[i * num_blocks : (i + 1) * num_blocks] for i in range(6)]
        solve_0, solve_1, d_update_0, d_update_1, *others = all_blocks[6 * num_blocks :]
        return cls(
            (lists[0], lists[1]), lists[2], lists[3], (lists[4], lists[5]),
            [solve_0, solve_1], [d_update_0, d_update_1], *others,
        )  # fmt: skip


def run_states_backward(d_output, beta, prepared, corrections, d_final_state, runs):
    """Run the kernel.

    Args:
        d_output: [B, T, H, V] bfloat16.
        beta: [B, H, T] float32.
        prepared: what `prepare` returned.
        corrections: [B, H, chunks, 64, V] bfloat16, as `run_states` returned them.
        d_final_state: [B, N, H, K, V] float32.
        runs: as given to `run_states`.

    Returns:
        d_v [B, T, H, V] bfloat16; d_beta [B, V / 64, H, T] float32, to be summed over its second
        dimension; the gradients of the states after the chunks [B, H, chunks, K, V] bfloat16; those
        of the initial states [B, N, H, K, V] float32, of runs that have chunks and do not continue
        the run before them.
    """
    num_rows, num_tokens, num_heads, value_dim = d_output.shape
    key_dim, num_slices = d_final_state.shape[-2], value_dim // BLOCK
    num_blocks = key_dim // BLOCK
    per_chunk = (num_rows, num_heads, num_tokens // CHUNK)
    results = (
        jax.ShapeDtypeStruct(d_output.shape, _BF16),
        jax.ShapeDtypeStruct((num_rows, num_slices, num_heads, num_tokens), _F32),
        jax.ShapeDtypeStruct((*per_chunk, key_dim, value_dim), _BF16),
        jax.ShapeDtypeStruct(d_final_state.shape, _F32),
    )
    scratch = {
        "operands": blocks(_Blocks.number(num_blocks)),
        "zeros": plgpu.SMEM((2 * CHUNK,), jnp.int32),
        "beta_row": plgpu.SMEM((CHUNK,), _F32),
        "first": plgpu.Barrier(num_arrivals=2 * num_blocks + 3),
        "second": plgpu.Barrier(num_arrivals=3),
        "total_rows": plgpu.SMEM((num_blocks, BLOCK), _F32),
        "third": plgpu.Barrier(num_arrivals=3 * num_blocks),
        "d_beta_row": plgpu.SMEM((CHUNK,), _F32),
        "exchange": plgpu.SMEM((BLOCK, BLOCK), _F32),
        "exchanged": plgpu.Barrier(num_arrivals=1),
    }
    has_runs = runs is not None

    def body(d_output, beta, *refs, **scratch):
        prepared, corrections, d_final_state, refs = Prepared(*refs[:6]), *refs[6:8], refs[8:]
        runs, refs = (refs[0], refs[1:]) if has_runs else (None, refs)
        _kernel(d_output, beta, prepared, corrections, d_final_state, runs, *refs, **scratch)

    kernel = cost.kernel(
        body, cost.states_backward_cost(d_output, d_final_state),
        out_type=results, scratch_types=scratch,
        grid=(num_rows, num_heads, num_slices), grid_names=("row", "head", "values"),
        kernel_name="kda_states_backward",
    )  # fmt: skip
    arrays = (d_output, beta, *prepared, corrections, d_final_state)
    return kernel(*arrays, *((runs,) if has_runs else ()))


def _kernel(
    d_output, beta, prepared, corrections, d_final_state, runs, d_v, d_beta, d_states,
    d_initial_state,
    *, operands, zeros, beta_row, first, second, total_rows, third, d_beta_row, exchange, exchanged,
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
        for part in range(2):
            copy(first, *by_key(prepared.k_end.at[row, head, chunk, part], to.k_end[part]))
        copy(first, (d_output.at[row, tokens(chunk), head, channels], to.d_output))
        copy(first, (prepared.score_q.at[row, head, chunk], to.score_q))
        copy(first, (beta.at[row, head, tokens(chunk)], beta_row))

    def start_second(chunk):
        to = views()
        copy(second, *((prepared.solve.at[row, head, chunk, part], to.solve[part])
                       for part in range(2)))  # fmt: skip
        copy(second, (corrections.at[row, head, chunk, :, channels], to.correction))

    def start_third(chunk):
        to = views()
        copy(third, *by_key(prepared.q_start.at[row, head, chunk], to.q_start))
        copy(third, *by_key(prepared.k_start.at[row, head, chunk], to.k_start))
        copy(third, *((prepared.total.at[row, head, chunk, keys[i]], total_rows.at[i])
                      for i in range(num_blocks)))  # fmt: skip

    def step(number, d_state):
        chunk = num_chunks - 1 - number
        at = views()

        def state_of_run(array):
            return array.at[row, run_of(runs, row, chunk), head, :, channels]

        def add_final(d_state):
            added = load_state(state_of_run(d_final_state), exchange, exchanged)
            return tuple(x + y for x, y in zip(d_state, added, strict=True))

        d_state = lax.cond(
            closes_run(runs, row, chunk, num_chunks), add_final, lambda x: x, d_state
        )
        # The copies to main memory of the step before have read their blocks.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for index in range(num_blocks):
            at.d_state[0][index][...], at.d_state[1][index][...] = split(d_state[index])
        plgpu.commit_smem()
        for index in range(num_blocks):
            plgpu.copy_smem_to_gmem(
                at.d_state[0][index], d_states.at[row, head, chunk, keys[index], channels]
            )
        plgpu.barrier_wait(first)
        beta_rows = over_rows(beta_row[...])
        through_state = [
            fine_pairs(*([part[i] for part in parts] for parts in (at.k_end, at.d_state)))
            for i in range(num_blocks)
        ]
        d_update = multiply(
            (transposed(at.score_q), at.d_output), *(pair for x in through_state for pair in x)
        )
        at.d_update[0][...], at.d_update[1][...] = split(beta_rows * d_update)
        plgpu.commit_smem()
        plgpu.barrier_wait(second)
        solve = [transposed(x) for x in at.solve]
        d_solved = d_update - multiply(*fine_pairs(solve, at.d_update))
        at.d_v[...] = (beta_rows * d_solved).astype(_BF16)
        d_beta_row[...] = jnp.sum(d_solved * at.correction[...].astype(_F32), axis=1)
        plgpu.commit_smem()
        pl.when(chunk > 0)(lambda: start_second(chunk - 1))
        plgpu.copy_smem_to_gmem(at.d_v, d_v.at[row, tokens(chunk), head, channels])
        plgpu.copy_smem_to_gmem(d_beta_row, d_beta.at[row, values, head, tokens(chunk)])
        plgpu.barrier_wait(third)
        d_state = tuple(
            over_rows(jnp.exp(total_rows[i])) * d_state[i]
            + multiply((transposed(at.q_start[i]), at.d_output))
            - multiply((transposed(at.k_start[i]), at.d_v))
            for i in range(num_blocks)
        )
        plgpu.commit_smem()
        pl.when(chunk > 0)(lambda: start_first(chunk - 1))
        pl.when(chunk > 0)(lambda: start_third(chunk - 1))

        def leave_run(d_state):
            store_state(d_state, state_of_run(d_initial_state), exchange)
            return tuple(jnp.zeros_like(x) for x in d_state)

        return lax.cond(opens_run(runs, row, chunk), leave_run, lambda x: x, d_state)

    tiles.write_zeros(zeros)
    last = num_chunks - 1
    start_first(last)
    start_second(last)
    start_third(last)
    state = tuple(lax.full((BLOCK, BLOCK), 0.0, _F32) for _ in range(num_blocks))
    lax.fori_loop(0, num_chunks, step, state)
    plgpu.wait_smem_to_gmem(0)
