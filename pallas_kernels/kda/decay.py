"""Decay factors inside one tile of tokens, none of which can overflow or lose a difference.

With `G` the running sum of the log decay, the score of token t on an earlier token s of the same
tile is `sum_c x_tc exp(G_tc - G_sc) k_sc`. To be a matrix product the exponential must be split
into a factor of t and a factor of s. A split is a level, and the score is the sum over levels of
`mask * ((x row_factor) (k key_factor)^T)`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Level(NamedTuple):
    """One split of the decay between pairs of tokens."""

    row_factor: jax.Array  # [..., C, K], exp(reach @ log_decay)
    key_factor: jax.Array  # [..., C, K], exp(key_sign * reach @ log_decay)
    mask: np.ndarray  # [C, C] bool, the pairs (t, s) that the split is right for
    reach: np.ndarray  # [C, C], which log decays are in the exponent of each row
    key_sign: int


class Decay(NamedTuple):
    """Decay factors of one tile; arrays [..., C, K]."""

    levels: list[Level]
    from_start: jax.Array  # from the start of the tile up to and including the token
    to_end: jax.Array  # after the token to the end of the tile
    total: jax.Array  # [..., K], over the whole tile


def bounded_decay(log_decay: jax.Array) -> Decay:
    """Split at the middle row: one level, exponents up to (C / 2) * max(-log_decay) on both sides.

    Half the range on either side stays within float32 for C = 16 down to a log decay of -5 (e^40),
    where a split at the first row would reach e^80 and overflow in the product.

    Args:
        log_decay: [..., C, K].
    """
    size = log_decay.shape[-2]
    triangle = np.tri(size)
    # Faster than a cumulative sum over few rows.
    running = matrix_product(triangle, log_decay)
    middle, last = running[..., size // 2 : size // 2 + 1, :], running[..., -1:, :]
    row_factor = jnp.exp(running - middle)
    key_factor = 1 / row_factor
    to_middle, after_middle = jnp.exp(middle), jnp.exp(last - middle)
    return Decay(
        levels=[Level(row_factor, key_factor, triangle > 0, triangle - triangle[size // 2], -1)],
        from_start=row_factor * to_middle,
        to_end=key_factor * after_middle,
        total=(to_middle * after_middle)[..., 0, :],
    )


def unbounded_decay(log_decay: jax.Array) -> Decay:
    """Split at the borders of blocks that double in size: right for any decay, -inf included.

    Blocks of b rows come in pairs. A row of the later block carries the decay from the border of
    its pair to itself, a row of the earlier block the decay from itself to the border; each row
    needs one of the two. All factors are products of decays between two tokens: at most 1, and
    exact where they underflow. Pairs of blocks of 1, 2, 4, ... rows cover every t > s once.

    Args:
        log_decay: [..., C, K], C a power of two.
    """
    size = log_decay.shape[-2]
    index = np.arange(size)
    decay = jnp.exp(log_decay)
    one = jnp.ones_like(decay)
    levels = [Level(one, one, np.eye(size, dtype=bool), np.zeros((size, size)), 1)]
    # Within blocks of `block` rows: decay from the block's start to each row, after each row to the
    # block's end, and over the whole block ([..., C / block, K]).
    from_start, to_end, total = decay, one, decay
    block = 1
    while block < size:
        start_earlier, start_later = _pairs(from_start, block)
        end_earlier, end_later = _pairs(to_end, block)
        total_earlier, total_later = _pairs(total, 1)
        factor = _join(end_earlier, start_later)
        number = index // block
        later = number[:, None] % 2 == 1
        mask = later & (number[None] == number[:, None] - 1)
        order = index[:, None] - index[None]
        reach = (number[:, None] == number[None]) & np.where(later, order >= 0, order < 0)
        levels.append(Level(factor, factor, mask, reach, 1))
        from_start = _join(start_earlier, start_later * total_earlier)
        to_end = _join(end_earlier * total_later, end_later)
        total = (total_earlier * total_later)[..., 0, :]
        block *= 2
    return Decay(levels, from_start, to_end, total[..., 0, :])


def _pairs(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """View rows [..., n * 2 * block, K] as earlier and later blocks, [..., n, block, K] each."""
    paired = x.reshape(*x.shape[:-2], -1, 2, block, x.shape[-1])
    return paired[..., 0, :, :], paired[..., 1, :, :]


def _join(earlier: jax.Array, later: jax.Array) -> jax.Array:
    """Put blocks [..., n, block, K] back in order, the inverse of `_pairs`."""
    paired = jnp.stack([earlier, later], axis=-3)
    return paired.reshape(*paired.shape[:-4], -1, paired.shape[-1])


def matrix_product(matrix: np.ndarray, x: jax.Array) -> jax.Array:
    """Multiply a constant matrix [R, C] with x [..., C, K]."""
    batch = jnp.broadcast_to(jnp.asarray(matrix, x.dtype), (*x.shape[:-2], *matrix.shape))
    return jnp.matmul(batch, x, precision=jax.lax.Precision.HIGHEST)
