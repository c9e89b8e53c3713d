"""Decayed scores of a chunk inside the TPU kernels: what does not depend on the state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.mosaic_tpu_chunk import (
    CHUNK,
    Decay,
    decay_factors,
    invert_unit_lower,
    product,
)
from pallas_kernels.kda.mosaic_tpu_inputs import Marks, Options, Tokens


class Scores(NamedTuple):
    """The part of a chunk that does not depend on the state; lists by head."""

    decay: Decay
    keys: jax.Array  # beta k, [C, heads * K]
    pairs: list[jax.Array]  # keys on earlier keys, then queries on earlier keys, [2C, C] float32
    own: list[jax.Array]  # query of a token on its key, [C, 1]
    inverse: list[jax.Array]  # of I + the upper half of pairs, [C, C]


def both(tokens: Tokens, factor: jax.Array) -> jax.Array:
    """Keys, then queries, times the factor: [2C, heads * K], for one product instead of two."""
    rows = [tokens.k * factor, tokens.q * factor]
    return jnp.concatenate(rows, axis=0)


def cut_runs(decay: Decay, marks: Marks) -> Decay:
    """Remove what would pass from one run to another."""
    if marks.same_run is None:
        return decay
    return decay._replace(
        from_start=jnp.where(marks.from_start, decay.from_start, 0),
        to_end=jnp.where(marks.to_end, decay.to_end, 0),
        total=jnp.where(marks.from_start[CHUNK - 1 :], decay.total, 0),
    )


def pair_masks(options: Options, marks: Marks) -> list[jax.Array]:
    """Pairs that each split is right for, [2C, C]."""
    masks = [split.mask() for split in options.splits]
    if marks.same_run is not None:
        masks = [mask & marks.same_run for mask in masks]
    return [jnp.concatenate([mask, mask], axis=0) for mask in masks]


def score(options: Options, tokens: Tokens, marks: Marks, reach: jax.Array) -> Scores:
    """Return the decayed scores of a chunk and their inverse."""
    exact, heads = options.exact, range(options.heads)
    decay = decay_factors(tokens.log_decay, reach, options.splits)
    beta = [tokens.beta[:, h : h + 1] for h in heads]
    keys = jnp.concatenate([tokens.k[:, options.key_lanes(h)] * beta[h] for h in heads], axis=1)
    pairs = [None for _ in heads]
    factors = zip(decay.rows, decay.keys, pair_masks(options, marks), strict=True)
    for row_factor, key_factor, mask in factors:
        rows = both(tokens, row_factor)
        columns = keys * key_factor
        for h in heads:
            lanes = options.key_lanes(h)
            # Pairs that the split is wrong for may be infinite.
            found = jnp.where(
                mask, product(rows[:, lanes], columns[:, lanes], "nt", exact=exact, fine=True), 0
            )
            pairs[h] = found if pairs[h] is None else pairs[h] + found
    products = tokens.q * keys
    own = [jnp.sum(products[:, options.key_lanes(h)], axis=1, keepdims=True) for h in heads]
    inverse = invert_unit_lower([x[:CHUNK] for x in pairs], exact)
    return Scores(cut_runs(decay, marks), keys, pairs, own, inverse)
