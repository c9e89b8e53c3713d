"""Chunks of the vocabulary with a running logsumexp; small problems keep their logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import align_varying
from pallas_kernels.cross_entropy.gradients import (
    add_up_gradients,
    chunk_columns,
    over_vocabulary,
    precision_of,
)
from pallas_kernels.device import current_device
from pallas_kernels.tiles import choose_tiles


@dataclasses.dataclass(frozen=True)
class XlaTiles:
    """Sizes of the `jax.numpy` form.

    Attributes:
        kept: up to this many logits M * W, all of them are computed at once and their exponentials
            kept for the backward pass, which saves it a third of its products.
        chunk: logits of one chunk M * columns otherwise.
    """

    kept: int = 1 << 21  # 8 MiB
    chunk: int = 1 << 25  # 128 MiB


# Chunks that fit the caches of a CPU are faster there than all logits at once; accelerators read
# and write the sum of x's gradient once per chunk, so that theirs are larger.
TILES = {"cpu": XlaTiles(chunk=1 << 22)}


def _tiles() -> XlaTiles:
    return choose_tiles("cross_entropy_xla", TILES.get(current_device().platform, XlaTiles()))


def logit_terms(x: jax.Array, weight: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.cross_entropy.logit_terms`."""
    return _terms(*align_varying(x, weight, targets))


def _logits(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(
        x, weight, precision=precision_of(x.dtype), preferred_element_type=jnp.float32
    )


@jax.custom_vjp
def _terms(x, weight, targets):
    return _forward(x, weight, targets)[0]


def _forward(x, weight, targets):
    tiles = _tiles()
    (num_tokens, _), vocabulary = x.shape, weight.shape[1]
    keeps = num_tokens * vocabulary <= tiles.kept
    columns = vocabulary if keeps else chunk_columns(num_tokens, vocabulary, tiles.chunk)
    kept = None

    def step(start, width, running):
        nonlocal kept
        peak, total, chosen = running
        logits = _logits(x, lax.dynamic_slice_in_dim(weight, start, width, axis=1))
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=-1))
        powers = jnp.exp(logits - new_peak[:, None])
        # The first chunk has no peak before it: exp(-inf - finite) is 0.
        total = total * jnp.exp(peak - new_peak) + jnp.sum(powers, axis=-1)
        if keeps:
            kept = (powers, total)
        return new_peak, total, chosen + _pick(logits, targets - start)

    zero = jnp.zeros_like(x[:, 0], dtype=jnp.float32)
    peak, total, chosen = over_vocabulary(vocabulary, columns, step, (zero - jnp.inf, zero, zero))
    logsumexp = peak + jnp.log(total)
    return (logsumexp, chosen), (x, weight, targets, logsumexp, kept)


def _pick(logits: jax.Array, column: jax.Array) -> jax.Array:
    """logits[m, column[m]], 0 where the column is outside."""
    inside = (column >= 0) & (column < logits.shape[1])
    column = jnp.where(inside, column, 0)[:, None]
    picked = jnp.take_along_axis(logits, column, axis=1, mode="promise_in_bounds")[:, 0]
    return jnp.where(inside, picked, 0)


def _backward(residuals, cotangents):
    x, weight, targets, logsumexp, kept = residuals
    d_logsumexp, d_chosen = cotangents
    tiles = _tiles()
    vocabulary = weight.shape[1]
    columns = vocabulary if kept is not None else chunk_columns(len(x), vocabulary, tiles.chunk)

    def d_logits(start, part):
        is_target = jnp.arange(part.shape[1]) == (targets - start)[:, None]
        if kept is None:
            d = jnp.exp(_logits(x, part) - logsumexp[:, None]) * d_logsumexp[:, None]
        else:
            powers, total = kept
            d = powers * (d_logsumexp / total)[:, None]
        return (d + jnp.where(is_target, d_chosen[:, None], 0)).astype(x.dtype)

    return *add_up_gradients(x, weight, columns, d_logits), None


_terms.defvjp(_forward, _backward)
