"""Decayed scores inside a chunk, and their gradients, without ever forming exp of a large number.

A score is `sum_c x_tc k_sc exp(G_tc - G_sc)` for s < t, `G` the running sum of the log decay. Two
neighbouring blocks of rows meet at their border: the queries of the later one carry the decay from
the border to the token, the keys of the earlier one the decay from the token to the border. Both
are at most 1, and both are sums of the decays in between, never differences of running sums. Blocks
double until they fill the chunk; the smallest are single tokens, or tiles with a promise on the
decay, inside of which both factors refer to the middle row.
"""

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST

# exp of anything lower is 0 in float64, too; keeps sums of -inf apart from NaN.
_LOWEST = -1000.0


def _pairs(x, block):
    """View rows [..., C, K] as pairs of blocks: (earlier, later), each [..., C/2b, b, K]."""
    paired = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * block), 2, block, x.shape[-1])
    return paired[..., 0, :, :], paired[..., 1, :, :]


def _unpair(earlier, later):
    """Inverse of `_pairs`."""
    paired = jnp.stack([earlier, later], axis=-3)
    return paired.reshape(*paired.shape[:-4], -1, paired.shape[-1])


def _dot(spec, x, y):
    return jnp.einsum(spec, x, y, precision=_HIGHEST)


def _place(diagonal, below):
    """Put blocks together: diagonal [..., 2n, b, b], below [..., n, b, b] -> [..., n, 2b, 2b]."""
    earlier, later = diagonal[..., 0::2, :, :], diagonal[..., 1::2, :, :]
    top = jnp.concatenate([earlier, jnp.zeros_like(earlier)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, later], axis=-1)], axis=-2)


def decay_factors(log_decay, leaf):
    """Return (from_start, to_end, totals per level, middle) of the decay, all at most 1 but middle.

    Args:
        log_decay: [..., C, K]; leaf: rows of the smallest block.
    """
    lead, (chunk, key_dim) = log_decay.shape[:-2], log_decay.shape[-2:]
    tiles = jnp.maximum(log_decay, _LOWEST).reshape(*lead, chunk // leaf, leaf, key_dim)
    until = jnp.cumsum(tiles, axis=-2)
    after = (
        jnp.flip(jnp.cumsum(jnp.flip(tiles, -2), axis=-2), -2) - tiles if leaf > 1 else 0 * tiles
    )
    from_start = jnp.exp(until).reshape(log_decay.shape)
    to_end = jnp.exp(after).reshape(log_decay.shape)
    totals = [jnp.exp(until[..., -1:, :])]  # [..., n, 1, K]
    while totals[-1].shape[-3] > 1:
        totals.append(totals[-1][..., 0::2, :, :] * totals[-1][..., 1::2, :, :])
    middle = jnp.exp(until - until[..., leaf // 2 : leaf // 2 + 1, :]).reshape(log_decay.shape)
    return from_start, to_end, totals, middle


def scores(q, k, log_decay, leaf):
    """q, k, log_decay [..., C, K] -> unmasked diagonal, lower scores of q and k, and factors."""
    from_start, to_end, totals, middle = decay_factors(log_decay, leaf)
    chunk = q.shape[-2]
    rows, keys = jnp.stack([q, k]), k

    def tile(x):
        return x.reshape(*x.shape[:-2], chunk // leaf, leaf, x.shape[-1])

    if leaf > 1:
        diagonal = _dot("...tk,...sk->...ts", tile(rows * middle), tile(keys / middle))
    else:
        diagonal = _dot("...tk,...sk->...ts", tile(rows), tile(keys))
    rows, keys = rows * from_start, keys * to_end
    block = leaf
    for total in totals[:-1]:
        earlier_total, later_total = total[..., 0::2, :, :], total[..., 1::2, :, :]
        rows_earlier, rows_later = _pairs(rows, block)
        keys_earlier, keys_later = _pairs(keys, block)
        below = _dot("...tk,...sk->...ts", rows_later, keys_earlier)
        diagonal = _place(diagonal, below)
        rows = _unpair(rows_earlier, rows_later * earlier_total)
        keys = _unpair(keys_earlier * later_total, keys_later)
        block *= 2
    return diagonal[..., 0, :, :], rows, keys, totals[-1][..., 0, 0, :]
