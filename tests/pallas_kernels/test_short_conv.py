import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import short_conv
from tests.pallas_kernels.compare import (
    DATA,
    REPLICATED,
    assert_matches_definition,
    assert_same_per_device,
    normal,
    values_and_gradients,
)
from tests.tolerances import assert_close

B, T, H, K, W = 3, 11, 2, 5, 4
# Holes, left padding, ends in padding, a segment of one token, a reused id, a row of padding only.
HOLES = np.array(
    [
        [0, 0, 4, 4, 0, 4, 0, 0, 4, 9, 9],
        [2, 2, 2, 5, 2, 2, 0, 2, 2, 2, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
)
PACKED = np.array(
    [
        [1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3],
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 2, 3, 3, 3, 0, 0, 0, 0],
    ]
)
X, WEIGHT, STATE = normal(0, B, T, H, K), normal(1, W, H, K), normal(2, B, W - 1, H, K)


@pytest.mark.parametrize("segment_ids", [None, PACKED, HOLES], ids=["whole", "packed", "holes"])
@pytest.mark.parametrize("with_state", [False, True])
def test_short_conv_matches_definition(segment_ids, with_state):
    def op(implementation, x, weight, *state):
        return short_conv(
            x,
            weight,
            segment_ids=segment_ids,
            initial_state=state[0] if state else None,
            implementation=implementation,
        )

    assert_matches_definition(op, (X, WEIGHT, STATE) if with_state else (X, WEIGHT))


def test_short_conv_in_bfloat16_matches_definition():
    def op(implementation, x, weight):
        return short_conv(x, weight, segment_ids=HOLES, implementation=implementation)

    (output, state), _ = assert_matches_definition(op, (X, WEIGHT), "bfloat16")
    assert output.dtype == state.dtype == jnp.bfloat16


@pytest.mark.parametrize("length", [1, 2, 7])
def test_short_conv_of_few_tokens_matches_definition(length):
    def op(implementation, x, weight):
        return short_conv(x, weight, implementation=implementation)

    assert_matches_definition(op, (normal(5, 1, length, 1, 3), normal(6, 5, 1, 3)))


def test_short_conv_ignores_what_padding_holds():
    padded = (HOLES == 0)[:, :, None, None]
    poisoned = jnp.where(padded, jnp.nan, jnp.float32(X))
    cotangents = [jnp.where(padded, jnp.nan, normal(7, *X.shape)), normal(8, B, W - 1, H, K)]
    op = lambda *arrays: short_conv(*arrays, segment_ids=HOLES)  # noqa: E731
    (output, state), (d_x, d_weight) = values_and_gradients(
        op, (poisoned, jnp.float32(WEIGHT)), cotangents
    )
    clean, _ = op(jnp.where(padded, 0, poisoned), jnp.float32(WEIGHT))
    assert_close(output, clean)
    assert not np.any(np.where(padded, output, 0)) and not np.any(np.where(padded, d_x, 0))
    assert np.isfinite(state).all() and np.isfinite(d_x).all() and np.isfinite(d_weight).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_short_conv_in_pieces_equals_one_pass(implementation):
    x, weight = jnp.float32(X[:1]), jnp.float32(WEIGHT)
    op = jax.jit(functools.partial(short_conv, implementation=implementation))
    ids = np.array([[0, 3, 3, 0, 3, 3, 3, 0, 0, 3, 3]])
    whole, last = op(x, weight, segment_ids=ids)
    state, pieces = None, []
    for start, stop in ((0, 1), (1, 4), (4, 5), (5, 9), (9, 11)):
        part = ids[:, start:stop]
        piece, state = op(x[:, start:stop], weight, segment_ids=part, initial_state=state)
        pieces.append(piece)
    assert_close(jnp.concatenate(pieces, axis=1), whole)
    assert_close(state, last)
    assert_close(last[0], x[0, [6, 9, 10]])


def test_short_conv_per_device_equals_one_device():
    def op(x, weight, ids):
        return list(short_conv(x, weight, segment_ids=ids))

    operands = (X[:2], WEIGHT, HOLES[:2])
    assert_same_per_device(op, operands, [DATA, REPLICATED, DATA], [DATA, DATA])


def test_short_conv_refuses_bad_input():
    x, weight = jnp.zeros((2, 3, 1, 4)), jnp.zeros((4, 1, 4))
    with pytest.raises(ValueError, match=r"weight has shape \(4, 2, 4\); expected \(4, 1, 4\)"):
        short_conv(x, jnp.zeros((4, 2, 4)))
    with pytest.raises(ValueError, match=r"segment_ids has shape \(3,\); expected \(2, 3\)"):
        short_conv(x, weight, segment_ids=jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match=r"initial_state has shape \(2, 4, 1, 4\)"):
        short_conv(x, weight, initial_state=jnp.zeros((2, 4, 1, 4)))
    with pytest.raises(TypeError, match="segment_ids has dtype float32; cast it to int32"):
        short_conv(x, weight, segment_ids=jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="weight has 1 tap; at least 2"):
        short_conv(x, weight[:1])
    with pytest.raises(ValueError, match=r"x has shape \(3, 4\); expected \[B, T, H, K\]"):
        short_conv(jnp.zeros((3, 4)), weight)


def test_implementation_names_are_used_or_refused():
    x, weight = jnp.zeros((2, 3, 1, 4)), jnp.zeros((4, 1, 4))
    with pytest.raises(ValueError, match="implementation='fast' is unknown; use None or one of"):
        short_conv(x, weight, implementation="fast")
    with pytest.raises(NotImplementedError, match="'mosaic_tpu': it runs on tpu, and this"):
        short_conv(x, weight, implementation="mosaic_tpu")


def test_no_rows_give_no_output_and_need_no_kernel():
    x, weight = jnp.zeros((0, 3, 1, 128)), jnp.zeros((4, 1, 128))
    output, state = short_conv(x, weight)
    assert output.shape == x.shape and state.shape == (0, 3, 1, 128)
    for platform in ("tpu", "gpu"):
        with (
            pallas_kernels.interpreted(platform),
            pytest.raises(NotImplementedError, match=r"x \(0, 3, 1, 128\) is empty; use 'xla'"),
        ):
            short_conv(x, weight, implementation=f"mosaic_{platform}")


def test_public_names_are_functions_after_importing_their_folders():
    assert all(callable(getattr(pallas_kernels, name)) for name in pallas_kernels.__all__)
    assert jax.tree.leaves(pallas_kernels.short_conv) == [short_conv]
