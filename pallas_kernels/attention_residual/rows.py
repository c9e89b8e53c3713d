"""What the kernels of both platforms share: the packed statistics and the differentiable whole.

A kernel keeps three numbers per row for its backward pass. They lie in one array [B, T, 128]
float32 in groups of `SLOTS`: probabilities, scores, inverse norms; within a group bank entries
0 .. N-1, then the current sum. 128 is what one such row takes on a TPU anyway.
"""

import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.checks import align_varying, empty
from pallas_kernels.debug import check_values

LANES = 128
SLOTS = 32  # rows that a group of statistics has room for


def unsupported_row(row: jax.Array) -> str | None:
    """Why the kernels do not take rows [.., D] like these, or None."""
    if 0 in row.shape[-3:]:  # a bank without entries has a form of its own
        return empty(rows=row)
    if row.shape[-1] % LANES:
        return f"D={row.shape[-1]} is not a multiple of {LANES}"
    if row.dtype not in (jnp.float32, jnp.bfloat16):
        return f"rows have dtype {row.dtype}; float32 and bfloat16 are supported"
    return None


def unsupported(bank: jax.Array, current: jax.Array) -> str | None:
    """Why the kernels do not take these arguments, or None."""
    if bank.dtype != current.dtype:
        return f"bank has dtype {bank.dtype} and current {current.dtype}; they must be the same"
    if bank.shape[0] >= SLOTS:
        return f"bank has {bank.shape[0]} entries; at most {SLOTS - 1} are supported"
    return unsupported_row(current)


def checked_most(op: str, most: int | None, num_entries: int) -> int:
    """Return the largest value that a count may have, `num_entries` for None.

    Raises:
        TypeError: it is no integer.
        ValueError: the bank has fewer entries.
    """
    if most is None:
        return num_entries
    try:
        most = operator.index(most)
    except TypeError:
        raise TypeError(f"{op}: most={most} must be an int or None; it is static") from None
    if not 0 <= most <= num_entries:
        raise ValueError(f"{op}: most={most} is outside 0..{num_entries}, the entries of the bank")
    return most


def check_eps(op: str, eps: float) -> None:
    """Raise ValueError unless eps is positive and finite: a row of zeros would give NaN."""
    if not isinstance(eps, jax.core.Tracer) and not 0 < eps < math.inf:
        raise ValueError(f"{op}: eps={eps} must be a positive number")


def checked_count(
    op: str, count: int | jax.Array, num_entries: int, most: int
) -> tuple[int | jax.Array, int | jax.Array]:
    """Return count, as an int where it is known, and 1, or NaN for a traced count out of range.

    A factor of NaN on the queries shows in all results and gradients. The count that is returned
    beside it is within range, so that no form reads or writes past the bank.

    Raises:
        TypeError: it is no integer.
        ValueError: it is known and out of range.
    """
    if not jnp.issubdtype(jnp.result_type(count), jnp.integer) or jnp.ndim(count) != 0:
        raise TypeError(f"{op}: count={count} must be an int or an int32 scalar")
    if not isinstance(count, jax.core.Tracer):
        count = int(count)
        if not 0 <= count <= num_entries:
            raise ValueError(
                f"{op}: count={count} is outside 0..{num_entries}, the entries of the bank"
            )
        if count > most:
            raise ValueError(f"{op}: count={count} is larger than most={most}; raise most")
        return count, 1

    def problem(value) -> str | None:
        if 0 <= value <= most:
            return None
        return f"{op}: count={value} is outside 0..{most} (most={most} of {num_entries} entries)"

    check_values(lambda xp, value: (value,), problem, count)
    fits = (count >= 0) & (count <= most)
    return jnp.where(fits, count, most), jnp.where(fits, 1, jnp.nan)


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """Return the op made of two kernels, with the signature of the other forms.

    It also returns the bank, when asked to: the gradient of that result is then the sum so far, to
    which the backward pass adds its own in place.

    Args:
        forward: (bank, current, query [D] float32, count, most, eps) -> mixed, statistics
            [B, T, 128]; `most` bounds a traced count.
        backward: (bank, current, query, count, most, statistics, d_mixed, d_probabilities
            [B, T, 128] float32, d_bank so far or None) -> d_bank, d_current, d_query [D] float32.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def mix(options, bank, current, query, count):
        return mix_forward(options, bank, current, query, count)[0]

    def mix_forward(options, bank, current, query, count):
        known, most, eps, returns_bank = options
        existing = count if known is None else known
        mixed, statistics = forward(bank, current, query, existing, most, eps)
        results = mixed, statistics[..., : bank.shape[0] + 1]
        kept = (bank, current, query, count, statistics)
        return (*results, bank) if returns_bank else results, kept

    def mix_backward(options, kept, cotangents):
        known, most, _, returns_bank = options
        bank, current, query, count, statistics = kept
        d_mixed, d_probabilities, *d_bank = cotangents
        padding = [(0, 0)] * 2 + [(0, LANES - d_probabilities.shape[-1])]
        gradients = backward(
            bank, current, query, count if known is None else known, most, statistics,
            d_mixed, jnp.pad(d_probabilities, padding), d_bank[0] if returns_bank else None,
        )  # fmt: skip
        return *gradients, None

    mix.defvjp(mix_forward, mix_backward)

    def attention_residual(bank, current, query, count, most, eps, returns_bank):
        """See `pallas_kernels.attention_residual`."""
        query = query.astype(jnp.float32)
        known = count if isinstance(count, int) else None
        if known == 0 or most == 0:
            one = jnp.ones((*current.shape[:-1], 1), jnp.float32)
            probabilities = jnp.pad(one, ((0, 0), (0, 0), (bank.shape[0], 0)))
            return (current, probabilities, bank) if returns_bank else (current, probabilities)
        bank, current, query, count = align_varying(
            bank, current, query, jnp.asarray(count, jnp.int32)
        )
        options = (known, most, eps, returns_bank)
        if current.shape[1] != 1:
            return mix(options, bank, current, query, count)
        # Single tokens of many sequences, as in decoding: one row of tokens.
        bank, current = jnp.swapaxes(bank, 1, 2), jnp.swapaxes(current, 0, 1)
        results = mix(options, bank, current, query, count)
        return tuple(jnp.swapaxes(result, -3, -2) for result in results)

    return attention_residual
