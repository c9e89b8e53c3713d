"""Gradients of queries, keys and log decays, for all chunks at once.

With the states before the chunks and the gradients of those after them no chunk waits for another.
Per chunk, with u = beta correction::

    d_score_q = d_output u^T, d_score_k = -d_v u^T           (pairs of a token and an earlier one)
    d_q_start = d_output S^T, d_k_start = -d_v S^T, d_k_end = u dS'^T

Each product of the forward pass decays its operands by `exp(M g)`. An operand x with the gradient
dx of its decayed form adds `exp(M g) dx` to its own gradient, and `M^T (x exp(M g) dx)` to that of
g. The pair of a token with itself meets no decay, and is left out of both sides.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_cost as cost
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
        "d_decay": plgpu.SMEM((CHUNK, BLOCK), _F32),
        "operands": blocks(_Blocks.number(log_decay.dtype)),
        "zeros": plgpu.SMEM((2 * CHUNK,), jnp.int32),
        "beta_row": plgpu.SMEM((CHUNK,), _F32),
        "total_row": plgpu.SMEM((BLOCK,), _F32),
        "loaded": plgpu.Barrier(num_arrivals=9 if has_marks else 5),
        "slice_loaded": plgpu.Barrier(num_arrivals=3),
        "states_loaded": plgpu.Barrier(num_arrivals=2),
    }
    if has_marks:
        # The run of each token twice, for it is read along rows and along columns.
        scratch["mark_rows"] = tuple(plgpu.SMEM((CHUNK,), _F32) for _ in range(4))

    def body(q, k, log_decay, beta, *refs, **scratch):
        marks, refs = (refs[0], refs[1:]) if has_marks else (None, refs)
        _kernel(q, k, log_decay, beta, marks, *refs, scale=scale, **scratch)

    kernel = cost.kernel(
        body,
        cost.gradients_cost(
            log_decay, d_output.shape[-1], parts=num_parts(log_decay.dtype), marked=has_marks
        ),
        out_type=results, scratch_types=scratch, grid=grid,
        grid_names=("row", "head", "chunk", "keys"), kernel_name="kda_gradients",
    )  # fmt: skip
    arrays = (total, d_output, d_v, corrections, states, d_states)
    return kernel(q, k, log_decay, beta, *((marks,) if has_marks else ()), *arrays)


class _Blocks(NamedTuple):
    """Operands in shared memory; what is named with "or" is first the one, then the other."""

    q: Any
    k: Any
    d_output_or_score_q: Any
    d_v_or_score_k: Any
    update_or_masked_q: Any
    state_or_masked_k: Any
    d_state_or_k_columns: Any
    reach: Any
    q_rows: Any
    k_rows: Any
    decay_parts: list

    @classmethod
    def number(cls, decay_dtype):
        """How many there are."""
        return 10 + num_parts(decay_dtype)

    @classmethod
    def of(cls, all_blocks):
        """Name them."""
        return cls(*all_blocks[:10], all_blocks[10:])

    def read_q(self):
        """Unscaled queries, float32."""
        return self.q[...].astype(_F32)

    def read_k(self):
        """Keys, float32."""
        return self.k[...].astype(_F32)


def _kernel(
    q, k, log_decay, beta, marks, total, d_output, d_v, corrections, states, d_states,
    d_q, d_k, d_log_decay,
    *, scale, d_decay, operands, zeros, beta_row, total_row, loaded, slice_loaded, states_loaded,
    mark_rows=None,
):  # fmt: skip
    tiles.write_zeros(zeros)

    def views():
        return _Blocks.of(tiles.hide(operands, zeros))

    row, head, chunk, keys = (lax.axis_index(name) for name in ("row", "head", "chunk", "keys"))
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    keys = pl.ds(keys * BLOCK, BLOCK)
    at = views()
    # A float32 decay comes to where its gradient is summed up later.
    decay = d_decay if log_decay.dtype == _F32 else at.reach
    for source, target in ((q, at.q), (k, at.k), (log_decay, decay)):
        copy(loaded, (source.at[row, tokens, head, keys], target))
    copy(loaded, (beta.at[row, head, tokens], beta_row))
    copy(loaded, (total.at[row, head, chunk, keys], total_row))
    if marks is not None:
        copy(loaded, *((marks.at[row, i % 3, tokens], mark_rows[i]) for i in range(4)))

    num_slices = d_output.shape[-1] // BLOCK

    def start_slice(index, *, with_states):
        channels, at = pl.ds(index * BLOCK, BLOCK), views()
        copy(
            slice_loaded,
            (d_output.at[row, tokens, head, channels], at.d_output_or_score_q),
            (d_v.at[row, tokens, head, channels], at.d_v_or_score_k),
            (corrections.at[row, head, chunk, :, channels], at.update_or_masked_q),
        )
        if with_states:
            copy(
                states_loaded,
                (states.at[row, head, chunk, keys, channels], at.state_or_masked_k),
                (d_states.at[row, head, chunk, keys, channels], at.d_state_or_k_columns),
            )

    def wait_for_slice():
        """Return d_output, d_v and u, once they have arrived."""
        at = views()
        plgpu.barrier_wait(slice_loaded)
        update = at.update_or_masked_q
        update[...] = (over_rows(beta_row[...]) * update[...].astype(_F32)).astype(_BF16)
        plgpu.commit_smem()
        return at.d_output_or_score_q, at.d_v_or_score_k, update

    start_slice(0, with_states=True)
    plgpu.barrier_wait(loaded)
    store_parts(decay[...].astype(_F32), at.decay_parts)
    plgpu.commit_smem()
    # Meanwhile the gradient of k_end takes the place of the decay: registers are short.
    d_decay[...] = lax.full((CHUNK, BLOCK), 0.0, _F32)

    def add_through_states(index, sums):
        q_start, k_start, total = sums
        at = views()
        plgpu.barrier_wait(states_loaded)
        state, d_state = at.state_or_masked_k, at.d_state_or_k_columns
        total = total + jnp.sum(state[...].astype(_F32) * d_state[...].astype(_F32), axis=1)
        d_output, d_v, update = wait_for_slice()
        d_decay[...] = d_decay[...] + multiply((update, transposed(d_state)))
        q_start = q_start + multiply((d_output, transposed(state)))
        k_start = k_start - multiply((d_v, transposed(state)))
        plgpu.commit_smem()
        # Then once more, from the first slice on, for the pairs.
        following = index + 1
        pl.when(following < num_slices)(lambda: start_slice(following, with_states=True))
        pl.when(following == num_slices)(lambda: start_slice(0, with_states=False))
        return q_start, k_start, total

    nothing = lax.full((CHUNK, BLOCK), 0.0, _F32)
    sums = (nothing, nothing, lax.full((BLOCK,), 0.0, _F32))
    d_q_start, d_k_start, d_total = lax.fori_loop(0, num_slices, add_through_states, sums)
    # Sums over rows become a value per column on the way through shared memory.
    total_row[...] = jnp.exp(total_row[...]) * d_total

    def decayed_to(reach, mark):
        """Return the decay between each token and a border of the chunk."""
        at = views()
        at.reach[...] = reach.astype(_BF16)
        plgpu.commit_smem()
        decayed = jnp.exp(exponent(at.reach, at.decay_parts))
        return decayed if marks is None else decayed * over_rows(mark_rows[mark][...])

    def through_reach(exponents, *, first=False):
        """Add M^T times the gradient of the exponents M g to that of g."""
        at = views()
        at.q_rows[...], at.k_rows[...] = tiles.split(exponents)
        plgpu.commit_smem()
        reach = transposed(at.reach)
        added = multiply((reach, at.q_rows), (reach, at.k_rows))
        d_decay[...] = added if first else d_decay[...] + added
        # Every warp's products are done before the operands change.
        plgpu.commit_smem()

    # The chunk's borders. Queries are unscaled until the end.
    of_end = decayed_to(tiles.reach_to_end(), 2) * d_decay[...]
    through_reach(views().read_k() * of_end, first=True)
    decayed = decayed_to(tiles.reach_from_start(), 1)
    of_q, of_k = decayed * d_q_start, decayed * d_k_start
    at = views()
    through_reach(scale * of_q * at.read_q() + of_k * at.read_k())
    of_k = of_k + of_end

    def add_pairs(index, sums):
        score_q, score_k = sums
        d_output, d_v, update = wait_for_slice()
        score_q = score_q + multiply((d_output, transposed(update)))
        score_k = score_k - multiply((d_v, transposed(update)))
        plgpu.commit_smem()
        following = index + 1
        pl.when(following < num_slices)(lambda: start_slice(following, with_states=False))
        return score_q, score_k

    d_score_q, d_score_k = lax.fori_loop(0, num_slices, add_pairs, (nothing, nothing))
    at = views()
    at.d_output_or_score_q[...] = d_score_q.astype(_BF16)
    at.d_v_or_score_k[...] = d_score_k.astype(_BF16)
    with_itself = over_rows(jnp.sum(tiles.keep(tiles.distance() == 0, d_score_q), axis=1))
    of_q = of_q + with_itself * at.read_k()
    of_k = of_k + scale * with_itself * at.read_q()

    def decayed_at(reach, nearest, farthest):
        """Store what pairs that are so far apart take, and return the decay of its rows."""
        at = views()
        at.reach[...] = reach.astype(_BF16)
        distances = tiles.distance()
        mask = (distances >= nearest) & (distances < farthest)
        if marks is not None:
            mask = mask & tiles.same_run(mark_rows[0], mark_rows[3])
        for source, target in (
            (at.d_output_or_score_q, at.update_or_masked_q),
            (at.d_v_or_score_k, at.state_or_masked_k),
        ):
            target[...] = tiles.keep(mask, source[...].astype(_F32)).astype(_BF16)
        plgpu.commit_smem()
        decayed = jnp.exp(exponent(at.reach, at.decay_parts))
        at.q_rows[...] = (scale * decayed * at.read_q()).astype(_BF16)
        at.k_rows[...] = (decayed * at.read_k()).astype(_BF16)
        return decayed

    # Pairs on two sides of a border, where rows and columns share one factor.
    def at_border(level, sums):
        of_q, of_k = sums
        border = lax.shift_right_logical(jnp.int32(tiles.SPLITS[0]), level)
        decayed = decayed_at(tiles.reach_to_border(border), border, 2 * border)
        plgpu.commit_smem()
        at = views()
        masked_q, masked_k = at.update_or_masked_q, at.state_or_masked_k
        added = decayed * multiply((masked_q, at.k_rows))
        of_q, of_exponents = of_q + added, scale * added * at.read_q()
        added = decayed * multiply(
            (masked_k, at.k_rows),
            (transposed(masked_q), at.q_rows),
            (transposed(masked_k), at.k_rows),
        )
        of_k, of_exponents = of_k + added, of_exponents + added * at.read_k()
        plgpu.commit_smem()
        through_reach(of_exponents)
        return of_q, of_k

    of_q, of_k = lax.fori_loop(0, len(tiles.SPLITS), at_border, (of_q, of_k))

    # Pairs within a tile.
    decayed = decayed_at(tiles.reach_to_middle(), 1, tiles.TILE)
    at = views()
    k_columns = at.d_state_or_k_columns
    k_columns[...] = (at.read_k() * tiles.reciprocal(decayed)).astype(_BF16)
    plgpu.commit_smem()
    masked_q, masked_k = at.update_or_masked_q, at.state_or_masked_k
    added = decayed * multiply((masked_q, k_columns))
    of_exponents = scale * added * at.read_q()
    # The scores have been read: their place takes the result, which frees registers.
    at.d_output_or_score_q[...] = (scale * (of_q + added)).astype(_BF16)
    added = decayed * multiply((masked_k, k_columns))
    of_k, of_exponents = of_k + added, of_exponents + added * at.read_k()
    added = tiles.reciprocal(decayed) * multiply(
        (transposed(masked_q), at.q_rows), (transposed(masked_k), at.k_rows)
    )
    of_exponents = of_exponents - added * at.read_k()
    at.d_v_or_score_k[...] = (of_k + added).astype(_BF16)
    plgpu.commit_smem()
    through_reach(of_exponents)

    at = views()
    decay = d_decay if log_decay.dtype == _F32 else at.reach
    decay[...] = (d_decay[...] + tiles.over_columns(total_row[...])).astype(decay.dtype)
    plgpu.commit_smem()
    for source, target in (
        (at.d_output_or_score_q, d_q),
        (at.d_v_or_score_k, d_k),
        (decay, d_log_decay),
    ):
        plgpu.copy_smem_to_gmem(source, target.at[row, tokens, head, keys])
    plgpu.wait_smem_to_gmem(0)
