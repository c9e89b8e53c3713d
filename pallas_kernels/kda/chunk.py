"""One chunk of the recurrence as matrix products, and its gradient written out.

With `rows` the keys and the scaled queries of the chunk, `keys` = beta k, all decayed as stated::

    carried    = rows(from chunk start) S                           [2C, V]
    score      = rows keys^T, decayed from s to t: k strictly below the diagonal, q also on it
    correction = (I + score_k)^-1 (v - carried_k)                   [C, V]
    output     = carried_q + score_q correction
    S'         = diag(total decay) S + keys(to chunk end)^T correction

so that beta and the decay appear in `keys` and `rows` only. Every decay factor is `exp(M g)` with a
constant matrix M, so that an array x that enters as `x exp(M g)` adds `M^T (x dx)` to the gradient
of the log decay g. Wherever M has no negative entries nothing cancels: a strong decay makes all
terms that hold it small, and its gradient is as precise as they are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.decay import Decay, bounded_decay, matrix_product, unbounded_decay
from pallas_kernels.kda.triangular import invert_unit_lower

_HIGHEST = jax.lax.Precision.HIGHEST


class Tokens(NamedTuple):
    """The tokens of one chunk, heads first, in the dtype of the computation."""

    q: jax.Array  # [B, H, C, K], scaled
    k: jax.Array  # [B, H, C, K]
    v: jax.Array  # [B, H, C, V]
    log_decay: jax.Array  # [B, H, C, K]
    beta: jax.Array  # [B, H, C]


class Runs(NamedTuple):
    """Where runs of tokens begin and end inside the chunk; all [B, C]."""

    run: jax.Array  # int32, number of the run
    from_start: jax.Array  # bool, the token continues the run that the chunk starts in
    to_end: jax.Array  # bool, the token is of the run that the chunk ends in


class Residuals(NamedTuple):
    """What the backward pass of the chunk reuses of its forward pass."""

    tokens: Tokens
    state: jax.Array
    decay: Decay
    masks: list
    correction: jax.Array
    inverse: jax.Array
    score_q: jax.Array


def _dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, precision=_HIGHEST)


def _rows(tokens: Tokens, factor: jax.Array) -> jax.Array:
    """Keys, then queries, times the factor: [B, H, 2C, K], for one product instead of two."""
    return jnp.concatenate([tokens.k * factor, tokens.q * factor], axis=-2)


def _decay(log_decay: jax.Array, runs: Runs | None, bounded: bool) -> tuple[Decay, list]:
    """Return the decay factors, cut where a run ends, and the mask [..., 2C, C] of each level."""
    decay = (bounded_decay if bounded else unbounded_decay)(log_decay)
    strict = np.tri(log_decay.shape[-2], k=-1, dtype=bool)
    masks = [np.concatenate([level.mask & strict, level.mask]) for level in decay.levels]
    if runs is None:
        return decay, masks
    same = runs.run[:, None, :, None] == runs.run[:, None, None, :]  # [B, 1, C, C]
    same = jnp.concatenate([same, same], axis=-2)
    from_start, to_end = (x[:, None, :, None] for x in (runs.from_start, runs.to_end))
    decay = decay._replace(
        from_start=jnp.where(from_start, decay.from_start, 0),
        to_end=jnp.where(to_end, decay.to_end, 0),
        total=jnp.where(from_start[..., -1, :], decay.total, 0),
    )
    return decay, [mask & same for mask in masks]


def chunk_forward(
    state: jax.Array, tokens: Tokens, runs: Runs | None, *, bounded: bool
) -> tuple[jax.Array, jax.Array, Residuals]:
    """Run one chunk.

    Args:
        state: [B, H, K, V].
        tokens: the chunk.
        runs: where runs begin and end in it, None where the chunk is of one run.
        bounded: which split of the decay (`decay.py`).

    Returns:
        (output [B, H, C, V], new state [B, H, K, V], residuals).
    """
    size = tokens.k.shape[-2]
    keys = tokens.beta[..., None] * tokens.k
    decay, masks = _decay(tokens.log_decay, runs, bounded)
    score = 0
    for level, mask in zip(decay.levels, masks, strict=True):
        pairs = _dot("bhtk,bhsk->bhts", _rows(tokens, level.row_factor), keys * level.key_factor)
        # Pairs that the split is wrong for may be infinite where the decay is at its bound.
        score = score + jnp.where(mask, pairs, 0)
    inverse, score_q = invert_unit_lower(score[..., :size, :]), score[..., size:, :]
    carried = _dot("bhtk,bhkv->bhtv", _rows(tokens, decay.from_start), state)
    correction = _dot("bhts,bhsv->bhtv", inverse, tokens.v - carried[..., :size, :])
    output = carried[..., size:, :] + _dot("bhts,bhsv->bhtv", score_q, correction)
    update = _dot("bhtk,bhtv->bhkv", keys * decay.to_end, correction)
    new_state = decay.total[..., None] * state + update
    residuals = Residuals(tokens, state, decay, masks, correction, inverse, score_q)
    return output, new_state, residuals


def chunk_backward(
    residuals: Residuals, d_output: jax.Array, d_new_state: jax.Array
) -> tuple[Tokens, jax.Array]:
    """Return the gradients of the tokens and of the state that enters the chunk.

    Args:
        residuals: as `chunk_forward` returns them.
        d_output: [B, H, C, V].
        d_new_state: [B, H, K, V].
    """
    tokens, state, decay, masks, correction, inverse, score_q = residuals
    size = tokens.k.shape[-2]
    keys = tokens.beta[..., None] * tokens.k
    d_correction = _dot("bhts,bhtv->bhsv", score_q, d_output)
    d_correction += _dot("bhtk,bhkv->bhtv", keys * decay.to_end, d_new_state)
    d_v = _dot("bhts,bhtv->bhsv", inverse, d_correction)
    d_carried = jnp.concatenate([-d_v, d_output], axis=-2)
    d_state = decay.total[..., None] * d_new_state
    d_state += _dot("bhtk,bhtv->bhkv", _rows(tokens, decay.from_start), d_carried)
    d_score = _dot("bhtv,bhsv->bhts", d_carried, correction)

    def through_rows(d_scaled, factor):
        """Return the gradients of k and q, and array times gradient, summed over both."""
        d_k, d_q = d_scaled[..., :size, :] * factor, d_scaled[..., size:, :] * factor
        return d_k, d_q, tokens.k * d_k + tokens.q * d_q

    d_k, d_q, exponent_rows = through_rows(
        _dot("bhtv,bhkv->bhtk", d_carried, state), decay.from_start
    )
    d_keys = decay.to_end * _dot("bhtv,bhkv->bhtk", correction, d_new_state)
    exponents = [(np.tri(size), exponent_rows), (np.tri(size, k=-1).T, keys * d_keys)]
    for level, mask in zip(decay.levels, masks, strict=True):
        d_pairs = jnp.where(mask, d_score, 0)
        level_k, level_q, exponent_rows = through_rows(
            _dot("bhts,bhsk->bhtk", d_pairs, keys * level.key_factor), level.row_factor
        )
        level_keys = level.key_factor * _dot(
            "bhts,bhtk->bhsk", d_pairs, _rows(tokens, level.row_factor)
        )
        d_k, d_q, d_keys = d_k + level_k, d_q + level_q, d_keys + level_keys
        if level.reach.any():  # a token on itself meets no decay
            exponents.append((level.reach, exponent_rows + level.key_sign * (keys * level_keys)))

    reaches, d_exponents = zip(*exponents, strict=True)
    d_log_decay = matrix_product(np.concatenate(reaches).T, jnp.concatenate(d_exponents, axis=-2))
    d_total = decay.total * _dot("bhkv,bhkv->bhk", state, d_new_state)
    d_tokens = Tokens(
        q=d_q,
        k=d_k + tokens.beta[..., None] * d_keys,
        v=d_v,
        log_decay=d_log_decay + d_total[..., None, :],
        beta=_dot("bhtk,bhtk->bht", tokens.k, d_keys),
    )
    return d_tokens, d_state
