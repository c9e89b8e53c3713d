"""Transitions over stretches of tokens, and rows cut into pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compose_transitions, kda, kda_transition
from pallas_kernels.device import Device
from pallas_kernels.kda import entering_states, plan_context
from tests.pallas_kernels.compare import assert_matches_definition, normal
from tests.tolerances import assert_close

B, T, H, K, V = 2, 19, 2, 8, 5


def _tokens(length=T):
    k = normal(1, B, length, H, K)
    log_decay = -5 / (1 + np.exp(-normal(3, B, length, H, K)))
    beta = 1 / (1 + np.exp(-normal(4, B, length, H)))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return k, normal(2, B, length, H, V), log_decay, beta


def _float32(arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize("segmented", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_transition_matches_definition_with_gradients(segmented):
    ids = np.array([[1, 0], [0, 0]]).repeat([T - 9, 9], axis=1) if segmented else None

    def op(implementation, *operands):
        k, v, log_decay, beta = operands
        return kda_transition(
            k, v, -jnp.abs(log_decay), beta, log_decay_min=-5.0,
            segment_ids=None if ids is None else jnp.asarray(ids), implementation=implementation,
        )  # fmt: skip

    (matrix, state), _ = assert_matches_definition(op, _tokens())
    assert matrix.shape == (B, H, K, K) and state.shape == (B, H, K, V)
    if segmented:
        assert_close(matrix[1], np.broadcast_to(np.eye(K), (H, K, K)))
        assert not np.any(state[1])


def test_transition_gives_the_final_state_of_any_initial_state():
    k, v, log_decay, beta = _float32(_tokens())
    initial = jnp.asarray(normal(9, B, H, K, V), jnp.float32)
    ids = jnp.asarray(np.array([[3, 3], [3, 4]]).repeat([9, 10], axis=1))
    matrix, state = jax.jit(kda_transition)(k, v, log_decay, beta, segment_ids=ids)
    expected = kda(
        k, k, v, log_decay, beta, initial_state=initial, segment_ids=ids, implementation="reference"
    )[1]  # fmt: skip
    assert_close(matrix @ initial + state, expected)
    assert not np.any(matrix[1])  # a run begins inside


def test_composed_transitions_are_those_of_the_whole():
    k, v, log_decay, beta = _float32(_tokens(32))
    transition = jax.jit(kda_transition)
    pieces = [transition(*(x[:, n : n + 8] for x in (k, v, log_decay, beta)))
              for n in range(0, 32, 8)]  # fmt: skip
    matrices, states = (jnp.stack(x) for x in zip(*pieces, strict=True))
    prefix_matrices, prefix_states = jax.jit(compose_transitions)(matrices, states)
    whole_matrix, whole_state = kda_transition(k, v, log_decay, beta, implementation="reference")
    assert_close(prefix_matrices[-1], whole_matrix)
    assert_close(prefix_states[-1], whole_state)
    initial = jnp.asarray(normal(9, B, H, K, V), jnp.float32)
    entering = jax.jit(entering_states)(matrices[:-1], states[:-1], initial)
    assert_close(entering[0], initial)
    for n in range(3):
        assert_close(entering[n + 1], prefix_matrices[n] @ initial + prefix_states[n])


@pytest.mark.slow
def test_wide_heads_take_two_runs():
    shape = (1, 20, 1)
    k = normal(1, *shape, 64) / 8
    arrays = _float32((k, normal(2, *shape, 200), -np.abs(normal(3, *shape, 64)), np.ones(shape)))
    initial = jnp.asarray(normal(9, 1, 1, 64, 200), jnp.float32)
    matrix, state = jax.jit(kda_transition)(*arrays)
    expected = kda(arrays[0], *arrays, initial_state=initial, implementation="reference")[1]
    assert_close(matrix @ initial + state, expected)


def _pieces_ids():
    """Runs over borders of pieces, at them, and pieces without tokens."""
    ids = np.array([[1, 0, 1, 2, 2], [0, 5, 7, 0, 7]]).repeat([4, 8, 11, 13, 10], axis=1)
    return jnp.asarray(ids)


def test_rows_in_pieces_equal_whole_rows():
    ids, length = _pieces_ids(), 46
    q = normal(0, B, length, H, K)
    *tokens, state = _float32((q, *_tokens(length), normal(9, B, H, K, V)))
    options = {"initial_state": state, "segment_ids": ids}
    expected = kda(*tokens, **options, implementation="reference")
    actual = jax.jit(functools.partial(kda, context_chunks=4, log_decay_min=-5.0))(
        *tokens, **options
    )
    for one, two in zip(actual, expected, strict=True):
        assert_close(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("segmented", [False, True])
def test_rows_in_pieces_have_the_gradients_of_whole_rows(segmented):
    length = 46
    ids = _pieces_ids() if segmented else None
    q = normal(0, B, length, H, K)
    operands = _float32((q, *_tokens(length), normal(9, B, H, K, V)))
    weight = jnp.asarray(normal(8, B, length, H, V), jnp.float32)

    def results(context_chunks):
        def loss(operands):
            *tokens, state = operands
            output, state = kda(
                *tokens, initial_state=state, segment_ids=ids, log_decay_min=-5.0,
                context_chunks=context_chunks,
            )  # fmt: skip
            return jnp.sum(output * weight) + jnp.sum(jnp.sin(state)), (output, state)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(operands)

    (_, expected), expected_gradients = results(None)
    (_, actual), gradients = results(4 if segmented else 3)
    for one, two in zip(actual, expected, strict=True):
        assert_close(one, two)
    for one, two in zip(gradients, expected_gradients, strict=True):
        assert_close(one, two, gradient=True)


def test_plan_cuts_only_where_cores_would_be_idle():
    h200 = Device("gpu", "NVIDIA H200")
    assert plan_context(8192, 96, 1, h200) == 1
    assert plan_context(65536, 12, 1, h200) == 11
    assert plan_context(4096, 12, 1, h200) == 8  # pieces of at least 512 tokens
    assert plan_context(65536, 12, 4, h200) == 1  # two more would not pay for three times the work
    assert plan_context(65536, 1, 1, Device("tpu", "TPU v5p")) == 1
    assert plan_context(65536, 1, 1) == 1
    assert plan_context(0, 1, 0, h200) == 1


def test_transitions_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"matrices \(2, 1, 3, 4\) and states \(2, 1, 3, 5\) must"):
        compose_transitions(jnp.ones((2, 1, 3, 4)), jnp.ones((2, 1, 3, 5)))
