"""Gradients of queries, keys and log decays, for all chunks at once.

With the states before the chunks and the gradients of those after them no chunk waits for another.
Per chunk, with u = beta correction::

    d_score_q = d_output u^T, d_score_k = -d_v u^T           (pairs of a token and an earlier one)
    d_q_start = d_output S^T, d_k_start = -d_v S^T, d_k_end = u dS'^T

Each product of the forward pass decays its operands by `exp(M g)`. An operand x with the gradient dx
of its decayed form adds `exp(M g) dx` to its own gradient and `M^T (x exp(M g) dx)` to that of g.
The pair of a token with itself meets no decay, and is left out of both sides.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_tiles as tiles
from pallas_kernels.kda.mosaic_gpu_prepare import exponent, num_parts, store_parts
from pallas_kernels.kda.mosaic_gpu_states import blocks, copy
from pallas_kernels.kda.mosaic_gpu_tiles import BLOCK, CHUNK, multiply, over_rows, transposed

_BF16, _F32 = jnp.bfloat16, jnp.float32


def run_gradients(
    q, k, log_decay, beta, marks, total, d_output, d_v, corrections, states, d_states, *, scale
):
    """Run the kernel.

    Args:
        q: [B, T, H, K] bfloat16.
        k: likewise.
        log_decay: [B, T, H, K] float32 or bfloat16.
        beta: [B, H, T] float32.
        marks: as given to `prepare`.
        total: [B, H, chunks, K] float32, as the states' kernels had it.
        d_output: [B, T, H, V] bfloat16.
        d_v: [B, T, H, V] bfloat16.
        corrections: [B, H, chunks, 64, V] bfloat16.
        states: [B, H, chunks, K, V] bfloat16, before the chunks.
        d_states: likewise, gradients of the states after the chunks.
        scale: multiplies q.

    Returns:
        d_q, d_k [B, T, H, K] bfloat16 and d_log_decay [B, T, H, K] in its dtype.
    """
    num_rows, num_tokens, num_heads, key_dim = q.shape
    grid = (num_rows, num_heads, num_tokens // CHUNK, key_dim // BLOCK)
    results = (
        jax.ShapeDtypeStruct(q.shape, _BF16),
        jax.ShapeDtypeStruct(k.shape, _BF16),
        jax.ShapeDtypeStruct(log_decay.shape, log_decay.dtype),
    )
    has_marks = marks is not None
    scratch = {
        "q_block": blocks(),
        "k_block": blocks(),
        "decay": plgpu.SMEM((CHUNK, BLOCK), log_decay.dtype),
        "decay_parts": blocks_of_parts(log_decay.dtype),
        "beta_row": plgpu.SMEM((CHUNK,), _F32),
        "total_row": plgpu.SMEM((BLOCK,), _F32),
        "loaded": plgpu.Barrier(num_arrivals=8 if has_marks else 5),
        "slices": blocks(5),
        "slice_loaded": plgpu.Barrier(num_arrivals=5),
        "operands": blocks(3),
    }
    if has_marks:
        scratch["mark_rows"] = plgpu.SMEM((3, CHUNK), _F32)

    def body(q, k, log_decay, beta, *refs, **scratch):
        marks, refs = (refs[0], refs[1:]) if has_marks else (None, refs)
        _kernel(q, k, log_decay, beta, marks, *refs, scale=scale, **scratch)

    kernel = plgpu.kernel(
        body, out_type=results, scratch_types=scratch, grid=grid,
        grid_names=("row", "head", "chunk", "keys"), compiler_params=tiles.PARAMS,
        kernel_name="kda_gradients",
    )  # fmt: skip
    arrays = (total, d_output, d_v, corrections, states, d_states)
    return kernel(q, k, log_decay, beta, *((marks,) if has_marks else ()), *arrays)


def blocks_of_parts(decay_dtype):
    """Shared memory for the parts of one block of log decays."""
    return plgpu.SMEM((num_parts(decay_dtype), 1, CHUNK, BLOCK), _BF16)


def _kernel(
    q, k, log_decay, beta, marks, total, d_output, d_v, corrections, states, d_states,
    d_q, d_k, d_log_decay,
    *, scale, q_block, k_block, decay, decay_parts, beta_row, total_row, loaded, slices, slice_loaded,
    operands, mark_rows=None,
):  # fmt: skip
    row, head, chunk, keys = (lax.axis_index(name) for name in ("row", "head", "chunk", "keys"))
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    keys = pl.ds(keys * BLOCK, BLOCK)
    for source, target in ((q, q_block), (k, k_block), (log_decay, decay)):
        copy(loaded, (source.at[row, tokens, head, keys], target))
    copy(loaded, (beta.at[row, head, tokens], beta_row))
    copy(loaded, (total.at[row, head, chunk, keys], total_row))
    if marks is not None:
        copy(loaded, *((marks.at[row, i, tokens], mark_rows.at[i]) for i in range(3)))

    d_output_block, d_v_block, update_block, state_block, d_state_block = (
        slices.at[index] for index in range(5)
    )

    def start_slice(index):
        channels = pl.ds(index * BLOCK, BLOCK)
        copy(
            slice_loaded,
            (d_output.at[row, tokens, head, channels], d_output_block),
            (d_v.at[row, tokens, head, channels], d_v_block),
            (corrections.at[row, head, chunk, :, channels], update_block),
            (states.at[row, head, chunk, keys, channels], state_block),
            (d_states.at[row, head, chunk, keys, channels], d_state_block),
        )

    start_slice(0)
    plgpu.barrier_wait(loaded)
    store_parts(decay[...].astype(_F32), decay_parts, 0)

    def add_slice(index, sums):
        score_q, score_k, q_start, k_start, k_end, total = sums
        plgpu.barrier_wait(slice_loaded)
        update_block[...] = (over_rows(beta_row[...]) * update_block[...].astype(_F32)).astype(
            _BF16
        )
        plgpu.commit_smem()
        score_q = score_q + multiply((d_output_block, transposed(update_block)))
        score_k = score_k - multiply((d_v_block, transposed(update_block)))
        q_start = q_start + multiply((d_output_block, transposed(state_block)))
        k_start = k_start - multiply((d_v_block, transposed(state_block)))
        k_end = k_end + multiply((update_block, transposed(d_state_block)))
        both = state_block[...].astype(_F32) * d_state_block[...].astype(_F32)
        total = total + jnp.sum(both, axis=1)
        plgpu.commit_smem()
        pl.when(index + 1 < num_slices)(lambda: start_slice(index + 1))
        return score_q, score_k, q_start, k_start, k_end, total

    num_slices = d_output.shape[-1] // BLOCK
    zeros = lax.full((CHUNK, BLOCK), 0.0, _F32)
    sums = (zeros,) * 5 + (lax.full((BLOCK,), 0.0, _F32),)
    d_score_q, d_score_k, d_q_start, d_k_start, d_k_end, d_total = lax.fori_loop(
        0, num_slices, add_slice, sums
    )
    # The blocks of the slices are free; a token's pair with itself is done at once.
    score_q_block, score_k_block, masked_q, masked_k, k_columns = (
        slices.at[index] for index in range(5)
    )
    score_q_block[...], score_k_block[...] = d_score_q.astype(_BF16), d_score_k.astype(_BF16)
    with_itself = over_rows(jnp.sum(tiles.keep(tiles.distance() == 0, d_score_q), axis=1))
    # Sums over rows become a value per column on the way through shared memory.
    total_row[...] = jnp.exp(total_row[...]) * d_total
    reach, q_rows, k_rows = (operands.at[index] for index in range(3))

    def read_q():
        return scale * q_block[...].astype(_F32)

    def read_k():
        return k_block[...].astype(_F32)

    def through_reach(exponents):
        """Return M^T times the gradient of the exponents M g."""
        q_rows[...], k_rows[...] = tiles.split(exponents)
        plgpu.commit_smem()
        result = multiply((transposed(reach), q_rows), (transposed(reach), k_rows))
        # Every warp's products are done before the operands change.
        plgpu.commit_smem()
        return result

    # The chunk's borders.
    reach[...] = tiles.reach_from_start().astype(_BF16)
    plgpu.commit_smem()
    decayed = jnp.exp(exponent(reach, decay_parts, 0))
    if marks is not None:
        decayed = decayed * over_rows(mark_rows[1])
    of_q, of_k = decayed * d_q_start, decayed * d_k_start
    d_g = through_reach(read_q() * of_q + read_k() * of_k)
    of_q, of_k = of_q + with_itself * read_k(), of_k + with_itself * read_q()
    reach[...] = tiles.reach_to_end().astype(_BF16)
    plgpu.commit_smem()
    decayed = jnp.exp(exponent(reach, decay_parts, 0))
    if marks is not None:
        decayed = decayed * over_rows(mark_rows[2])
    of_end = decayed * d_k_end
    d_g = d_g + through_reach(read_k() * of_end) + tiles.over_columns(total_row[...])
    of_k = of_k + of_end

    def store_masked(nearest, farthest):
        distances = tiles.distance()
        mask = (distances >= nearest) & (distances < farthest)
        if marks is not None:
            mask = mask & tiles.same_run(mark_rows[0])
        for source, target in ((score_q_block, masked_q), (score_k_block, masked_k)):
            target[...] = tiles.keep(mask, source[...].astype(_F32)).astype(_BF16)

    # Pairs on two sides of a border, where rows and columns share one factor.
    def at_border(level, sums):
        of_q, of_k, d_g = sums
        border = lax.shift_right_logical(jnp.int32(tiles.SPLITS[0]), level)
        reach[...] = tiles.reach_to_border(border).astype(_BF16)
        store_masked(border, 2 * border)
        plgpu.commit_smem()
        decayed = jnp.exp(exponent(reach, decay_parts, 0))
        q_rows[...] = (decayed * read_q()).astype(_BF16)
        k_rows[...] = (decayed * read_k()).astype(_BF16)
        plgpu.commit_smem()
        added_q = decayed * multiply((masked_q, k_rows))
        added_k = decayed * multiply(
            (masked_k, k_rows), (transposed(masked_q), q_rows), (transposed(masked_k), k_rows)
        )
        plgpu.commit_smem()
        d_g = d_g + through_reach(read_q() * added_q + read_k() * added_k)
        return of_q + added_q, of_k + added_k, d_g

    of_q, of_k, d_g = lax.fori_loop(0, len(tiles.SPLITS), at_border, (of_q, of_k, d_g))

    # Pairs within a tile.
    reach[...] = tiles.reach_to_middle().astype(_BF16)
    store_masked(1, tiles.TILE)
    plgpu.commit_smem()
    exponents = exponent(reach, decay_parts, 0)
    decayed, inverse = jnp.exp(exponents), jnp.exp(-exponents)
    q_rows[...] = (decayed * read_q()).astype(_BF16)
    k_rows[...] = (decayed * read_k()).astype(_BF16)
    k_columns[...] = (inverse * read_k()).astype(_BF16)
    plgpu.commit_smem()
    added_q = decayed * multiply((masked_q, k_columns))
    added_k = decayed * multiply((masked_k, k_columns))
    from_later = inverse * multiply((transposed(masked_q), q_rows), (transposed(masked_k), k_rows))
    plgpu.commit_smem()
    d_g = d_g + through_reach(read_q() * added_q + read_k() * (added_k - from_later))
    of_q, of_k = of_q + added_q, of_k + (added_k + from_later)

    q_rows[...], k_rows[...] = (scale * of_q).astype(_BF16), of_k.astype(_BF16)
    decay[...] = d_g.astype(decay.dtype)
    plgpu.commit_smem()
    for source, target in ((q_rows, d_q), (k_rows, d_k), (decay, d_log_decay)):
        plgpu.copy_smem_to_gmem(source, target.at[row, tokens, head, keys])
    plgpu.wait_smem_to_gmem(0)
