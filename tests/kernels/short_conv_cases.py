"""Operands of `short_conv`, and the check that its kernels share."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import short_conv
from tests.kernels.compare import assert_kernel_as_definition

TAPS = 4


def make_operands(batch, length, heads, dtype="float32", *, with_state=True, width=128):
    """x, weight (and initial state), and the gradients of output and final state."""
    rng = np.random.default_rng(length)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape), dtype)

    state = (batch, TAPS - 1, heads, width)
    operands = (normal(batch, length, heads, width), normal(TAPS, heads, width, dtype="float32"))
    if with_state:
        operands += (normal(*state),)
    return operands, (normal(batch, length, heads, width), normal(*state))


def packed_ids(batch, length):
    """Segments at random, the first row padded at its start and the last at its end."""
    starts = np.random.default_rng(0).random((batch, length)) < 0.1
    starts[:, length // 2 : length // 2 + 3] = True  # two segments of one token
    ids = 1 + np.cumsum(starts, axis=1)
    ids[0, : length // 5] = 0
    ids[-1, length - length // 7 :] = 0
    return ids


def ids_with_holes(batch, length):
    """Padding anywhere, and in the first row a stretch of it that is longer than a tile."""
    rng = np.random.default_rng(1)
    ids = np.where(rng.random((batch, length)) < 0.3, 0, packed_ids(batch, length))
    ids[0, length // 4 : length // 4 + length // 3] = 0
    ids[:, 1:] = np.where(rng.random((batch, length - 1)) < 0.03, 99, ids[:, 1:])
    return ids


def assert_as_definition(mode, operands, cotangents, ids):
    """Compare with NaN in padding; there outputs and gradients must be 0."""
    absent = None if ids is None else (np.asarray(ids) == 0)[:, :, None, None]

    def function(implementation, x, weight, state=None):
        return short_conv(
            x, weight, segment_ids=ids, initial_state=state, implementation=implementation
        )

    def spoil(operands, cotangents):
        if absent is None:
            return operands, cotangents
        x, *others = operands
        d_output, d_state = cotangents
        spoiled = jnp.where(absent, jnp.nan, x), jnp.where(absent, jnp.nan, d_output)
        return (spoiled[0], *others), (spoiled[1], d_state)

    output, _, d_x, *_ = assert_kernel_as_definition(
        mode, function, operands, cotangents, spoil=spoil
    )
    if absent is not None:
        assert not np.any(np.where(absent, output, 0)) and not np.any(np.where(absent, d_x, 0))
