"""The part of a chunk that no state enters, for all chunks at once: scores, and their inverse.

With G the sum of the log decay from the chunk's start, per chunk of 64 tokens::

    score_k[t, s] = sum_c k_tc exp(G_tc - G_sc) k_sc   below the diagonal, score_q on it, too
    solve         = score_k (I + beta score_k)^-1

so that `correction = x - solve (beta x)` solves `(I + score_k beta) correction = x`: the identity
stays out of what is rounded to bfloat16. Keys that are alike and decay slowly leave small
differences of large numbers there and, over many chunks, in the state: `solve` and the keys that
enter the state come in two bfloat16 parts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu_cost as cost
from pallas_kernels.kda import mosaic_gpu_tiles as tiles
from pallas_kernels.kda.mosaic_gpu_tiles import BLOCK, CHUNK, multiply, transposed

_BF16, _F32 = jnp.bfloat16, jnp.float32


class Prepared(NamedTuple):
    """What a chunk's tokens give; N chunks of 64 tokens."""

    q_start: jax.Array  # [B, H, N, 64, K] bfloat16, scaled and decayed from the chunk's start
    k_start: jax.Array  # [B, H, N, 64, K] bfloat16
    k_end: jax.Array  # [B, H, N, 2, 64, K] bfloat16, two parts; decayed to the chunk's end
    score_q: jax.Array  # [B, H, N, 64, 64] bfloat16
    solve: jax.Array  # [B, H, N, 2, 64, 64] bfloat16, two parts
    total: jax.Array  # [B, H, N, K] float32, the sum of the log decay


def prepare(q, k, log_decay, beta, marks, *, scale) -> Prepared:
    """Run the kernel.

    Args:
        q: [B, T, H, K] bfloat16, T a multiple of 64, K of 64.
        k: likewise.
        log_decay: [B, T, H, K] float32 or bfloat16, in [-5, 0].
        beta: [B, H, T] float32.
        marks: None, or [B, 3, T] float32: the number of each token's run; 1 where it continues the
            run that its chunk starts in, else 0; 1 where it is of the run that its chunk ends in.
        scale: multiplies q.

    """
    num_rows, num_tokens, num_heads, key_dim = q.shape
    grid = (num_rows, num_heads, num_tokens // CHUNK)
    wide = jax.ShapeDtypeStruct((*grid, CHUNK, key_dim), _BF16)
    wide_parts = jax.ShapeDtypeStruct((*grid, 2, CHUNK, key_dim), _BF16)
    square = jax.ShapeDtypeStruct((*grid, CHUNK, CHUNK), _BF16)
    square_parts = jax.ShapeDtypeStruct((*grid, 2, CHUNK, CHUNK), _BF16)
    total = jax.ShapeDtypeStruct((*grid, key_dim), _F32)
    num_blocks = key_dim // BLOCK
    block = (CHUNK, BLOCK)
    scratch = {
        "q_blocks": plgpu.SMEM((num_blocks, *block), _BF16),
        "k_blocks": plgpu.SMEM((num_blocks, *block), _BF16),
        "decay": plgpu.SMEM(block, log_decay.dtype),
        "decay_parts": plgpu.SMEM((num_parts(log_decay.dtype), num_blocks, *block), _BF16),
        "operands": plgpu.SMEM((4, *block), _BF16),
        "zeros": plgpu.SMEM((2 * CHUNK,), jnp.int32),
        "total_block": plgpu.SMEM((BLOCK,), _F32),
        "beta_row": plgpu.SMEM((CHUNK,), _F32),
        "loaded": plgpu.Barrier(num_arrivals=2 * num_blocks + 1 + (0 if marks is None else 4)),
        "decay_loaded": plgpu.Barrier(num_arrivals=1),
    }
    if marks is not None:
        # The run of each token twice, for it is read along rows and along columns.
        scratch["mark_rows"] = tuple(plgpu.SMEM((CHUNK,), _F32) for _ in range(4))

    def body(q, k, log_decay, beta, *refs, **scratch):
        marks, outputs = (None, refs) if len(refs) == 6 else (refs[0], refs[1:])
        _kernel(q, k, log_decay, beta, marks, *outputs, scale=scale, **scratch)

    kernel = cost.kernel(
        body,
        cost.prepare_cost(log_decay, parts=num_parts(log_decay.dtype), marked=marks is not None),
        out_type=(wide, wide, wide_parts, square, square_parts, total), scratch_types=scratch,
        grid=grid, grid_names=("row", "head", "chunk"), kernel_name="kda_prepare",
    )  # fmt: skip
    return Prepared(*kernel(q, k, log_decay, beta, *(() if marks is None else (marks,))))


def num_parts(decay_dtype) -> int:
    """bfloat16 parts that a log decay is split in."""
    return 1 if decay_dtype == _BF16 else 2


def _kernel(
    q, k, log_decay, beta, marks, q_start, k_start, k_end, score_q, solve, total,
    *, scale, q_blocks, k_blocks, decay, decay_parts, operands, zeros, total_block, beta_row,
    loaded, decay_loaded, mark_rows=None,
):  # fmt: skip
    row, head, chunk = (lax.axis_index(name) for name in ("row", "head", "chunk"))
    tokens = pl.ds(chunk * CHUNK, CHUNK)
    num_blocks = q_blocks.shape[0]

    def columns(index):
        return pl.ds(index * BLOCK, BLOCK)

    def parts(index):
        return [decay_parts.at[part, index] for part in range(decay_parts.shape[0])]

    def views():
        return tiles.hide(operands, zeros)

    def each_block(function):
        lax.fori_loop(0, num_blocks, lambda index, _: function(index), None)

    for index in range(num_blocks):
        for source, target in ((q, q_blocks), (k, k_blocks)):
            plgpu.copy_gmem_to_smem(
                source.at[row, tokens, head, columns(index)], target.at[index], loaded
            )
    plgpu.copy_gmem_to_smem(beta.at[row, head, tokens], beta_row, loaded)
    if marks is not None:
        for index in range(4):
            plgpu.copy_gmem_to_smem(marks.at[row, index % 3, tokens], mark_rows[index], loaded)

    @each_block
    def _(index):
        plgpu.copy_gmem_to_smem(
            log_decay.at[row, tokens, head, columns(index)], decay, decay_loaded
        )
        plgpu.barrier_wait(decay_loaded)
        g = decay[...].astype(_F32)
        total_block[...] = jnp.sum(g, axis=0)
        store_parts(g, parts(index))
        # Every warp has read the block before the next one arrives in its place.
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(total_block, total.at[row, head, chunk, columns(index)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    plgpu.barrier_wait(loaded)
    tiles.write_zeros(zeros)

    # To the chunk's borders: what the state needs.
    reach, *_ = views()
    reach[...] = tiles.reach_from_start().astype(_BF16)
    plgpu.commit_smem()

    @each_block
    def _(index):
        reach, first, second, _ = views()
        decayed = jnp.exp(exponent(reach, parts(index)))
        if marks is not None:
            decayed = decayed * tiles.over_rows(mark_rows[1][...])
        first[...] = (scale * decayed * q_blocks[index].astype(_F32)).astype(_BF16)
        second[...] = (decayed * k_blocks[index].astype(_F32)).astype(_BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(first, q_start.at[row, head, chunk, :, columns(index)])
        plgpu.copy_smem_to_gmem(second, k_start.at[row, head, chunk, :, columns(index)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    reach, *_ = views()
    reach[...] = tiles.reach_to_end().astype(_BF16)
    plgpu.commit_smem()

    @each_block
    def _(index):
        reach, first, second, _ = views()
        decayed = jnp.exp(exponent(reach, parts(index)))
        if marks is not None:
            decayed = decayed * tiles.over_rows(mark_rows[2][...])
        first[...], second[...] = tiles.split(decayed * k_blocks[index].astype(_F32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(first, k_end.at[row, head, chunk, 0, :, columns(index)])
        plgpu.copy_smem_to_gmem(second, k_end.at[row, head, chunk, 1, :, columns(index)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # Scores: pairs on two sides of a border, where rows and columns share one factor, then pairs
    # within a tile.
    def operands_at_border(index):
        reach, first, second, _ = views()
        decayed = jnp.exp(exponent(reach, parts(index)))
        first[...] = (scale * decayed * q_blocks[index].astype(_F32)).astype(_BF16)
        second[...] = (decayed * k_blocks[index].astype(_F32)).astype(_BF16)
        return first, second, second

    def at_border(level, scores):
        border = lax.shift_right_logical(jnp.int32(tiles.SPLITS[0]), level)
        reach, *_ = views()
        reach[...] = tiles.reach_to_border(border).astype(_BF16)
        plgpu.commit_smem()
        return _add_pairs(scores, num_blocks, operands_at_border, border, 2 * border)

    nothing = lax.full((CHUNK, CHUNK), 0.0, _F32)
    scores = lax.fori_loop(0, len(tiles.SPLITS), at_border, (nothing, nothing))

    def operands_in_tile(index):
        reach, first, second, third = views()
        exponents = exponent(reach, parts(index))
        k = k_blocks[index].astype(_F32)
        third[...] = (jnp.exp(-exponents) * k).astype(_BF16)
        decayed = jnp.exp(exponents)
        first[...] = (scale * decayed * q_blocks[index].astype(_F32)).astype(_BF16)
        second[...] = (decayed * k).astype(_BF16)
        return first, second, third

    reach, *_ = views()
    reach[...] = tiles.reach_to_middle().astype(_BF16)
    plgpu.commit_smem()
    score_of_q, score_of_k = _add_pairs(scores, num_blocks, operands_in_tile, 0, tiles.TILE)
    if marks is not None:
        same = tiles.same_run(mark_rows[0], mark_rows[3])
        score_of_k, score_of_q = tiles.keep(same, score_of_k), tiles.keep(same, score_of_q)

    block, *_ = views()
    block[...] = score_of_q.astype(_BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(block, score_q.at[row, head, chunk])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    solve_values = _solve(score_of_k, beta_row, operands, zeros)
    high, low, *_ = views()
    high[...], low[...] = tiles.split(solve_values)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(high, solve.at[row, head, chunk, 0])
    plgpu.copy_smem_to_gmem(low, solve.at[row, head, chunk, 1])
    plgpu.wait_smem_to_gmem(0)


def store_parts(g, parts):
    """Store a block of log decays in one or two bfloat16 parts."""
    if len(parts) == 1:
        parts[0][...] = g.astype(_BF16)
    else:
        parts[0][...], parts[1][...] = tiles.split(g)


def exponent(reach, parts):
    """Return M g, float32 [64, 64]."""
    return multiply(*((reach, part) for part in parts))


def _add_pairs(scores, num_blocks, store_operands, nearest, farthest):
    """Add the products of decayed queries and keys with decayed keys to the two scores [64, 64].

    Only pairs with a distance in [nearest, farthest) are added: what the others hold may be
    infinite. A key meets no key at distance 0, itself.
    """

    def add(index, scores):
        q_rows, k_rows, k_columns = store_operands(index)
        plgpu.commit_smem()
        of_q = multiply((q_rows, transposed(k_columns)))
        of_k = multiply((k_rows, transposed(k_columns)))
        distances = tiles.distance()
        mask = (distances >= nearest) & (distances < farthest)
        # Every warp's products are done before the operands change.
        plgpu.commit_smem()
        return (
            scores[0] + tiles.keep(mask, of_q),
            scores[1] + tiles.keep(mask & (distances != 0), of_k),
        )

    return lax.fori_loop(0, num_blocks, add, scores)


def _solve(score, beta_row, operands, zeros):
    """Return score (I + beta score)^-1, float32 [64, 64].

    Blocks of 1, 2, 4, ... rows are joined, bfloat16 operands; one Newton step with the score in
    two parts squares the error of that inverse X: with P = score X and R = I - X - beta P the
    better inverse is X + X R, and the result P + P R.
    """
    square = (CHUNK, CHUNK)
    lower = tiles.over_rows(beta_row[...], square) * score

    def join(level, inverse):
        border = lax.shift_left(jnp.int32(2), level)
        spare, partial, *_ = tiles.hide(operands, zeros)
        # The buffers alternate: warps may still read the one of the level before.
        current = operands.at[2 + lax.rem(level, 2)]
        spare[...] = tiles.keep(tiles.pairs_at(border, tiles.distance()), lower).astype(_BF16)
        current[...] = inverse.astype(_BF16)
        plgpu.commit_smem()
        partial[...] = multiply((current, spare)).astype(_BF16)
        plgpu.commit_smem()
        return inverse - multiply((partial, current))

    distances = tiles.distance()
    identity = tiles.keep(distances == 0, jnp.ones_like(score))
    inverse = identity - tiles.keep(tiles.pairs_at(1, distances), lower)
    inverse = lax.fori_loop(0, 5, join, inverse)
    plgpu.commit_smem()
    spare, partial, current, other = tiles.hide(operands, zeros)
    spare[...], partial[...] = tiles.split(score)
    current[...] = inverse.astype(_BF16)
    plgpu.commit_smem()
    product = multiply((spare, current), (partial, current))
    residual = -tiles.over_rows(beta_row[...], square) * product - current[...].astype(_F32)
    residual = residual + tiles.keep(tiles.distance() == 0, jnp.ones_like(score))
    plgpu.commit_smem()
    spare[...], other[...] = product.astype(_BF16), residual.astype(_BF16)
    plgpu.commit_smem()
    result = product + multiply((spare, other))
    plgpu.commit_smem()
    return result
