"""States in the middle of a row, for prefix caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda
from tests.pallas_kernels.compare import assert_matches_definition, normal
from tests.tolerances import assert_close

B, H, K, V = 2, 2, 8, 5


def _tokens(length, rows=B):
    q, k = (normal(n, rows, length, H, K) for n in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_decay = -5 / (1 + np.exp(-normal(3, rows, length, H, K)))
    return q, k, normal(2, rows, length, H, V), log_decay, np.abs(normal(4, rows, length, H)) / 4


def _op(positions, **options):
    def op(implementation, q, k, v, log_decay, beta, state):
        # Signs are what matters: differences of the definition must not make a decay positive.
        return kda(
            q, k, v, -jnp.abs(log_decay), beta, initial_state=state, log_decay_min=-5.0,
            state_positions=jnp.asarray(positions), implementation=implementation, **options,
        )  # fmt: skip

    return op


def test_states_at_every_offset_equal_those_of_prefixes():
    length = 38
    tokens = [jnp.asarray(x, jnp.float32) for x in _tokens(length)]
    state = jnp.asarray(normal(9, B, H, K, V), jnp.float32)
    every = np.broadcast_to(np.arange(length + 1), (B, length + 1))
    exact = jax.jit(lambda *a: _op(every)("reference", *a))(*tokens, state)
    # The state after n tokens, where nothing but prefixes of absent tokens is used.
    for count in (0, 1, 16, 33, length):
        ids = jnp.asarray(np.broadcast_to(np.arange(length) < count, (B, length)), jnp.int32)
        expected = kda(*tokens, initial_state=state, segment_ids=ids, implementation="reference")[1]
        np.testing.assert_array_equal(exact[2][:, count], expected)
    actual = jax.jit(lambda positions, *a: _op(positions)("xla", *a))
    for start in range(0, length + 1, 8):
        positions = np.minimum(start + np.array([[0, 1, 3, 7], [0, 0, 6, 7]]), length)
        output, final, states = actual(positions, *tokens, state)
        assert_close(output, exact[0])
        assert_close(final, exact[1])
        rows = np.arange(B)[:, None]
        assert_close(states, exact[2][rows, positions], name=f"states at {positions}")


@pytest.mark.slow
def test_states_at_positions_match_definition_with_gradients():
    positions = np.array([[0, 5, 5, 33], [16, 32, 38, 99]])
    assert_matches_definition(_op(positions), (*_tokens(38), normal(9, B, H, K, V)))


def test_states_at_positions_of_packed_rows_match_definition():
    ids = np.array([[0, 4, 0, 4, 7, 9], [2, 2, 2, 3, 0, 0]]).repeat([3, 7, 2, 9, 12, 5], axis=1)
    positions = np.array([[2, 10, 11, 15, 34], [1, 20, 22, 33, 36]])
    operands = (*_tokens(38), normal(9, B, 3, H, K, V))
    op = _op(positions, segment_ids=jnp.asarray(ids), num_segments=3)
    (_, final, states), _ = assert_matches_definition(op, operands)
    assert_close(states[0, 0], operands[5][0, 0], name="before all real tokens")
    assert_close(states[0, 1], states[0, 2], name="absent tokens between")
    assert_close(states[1, 4], final[1, 1], name="after all real tokens")
    assert_close(final[1, 2], operands[5][1, 2], name="a run that does not occur")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_excess_runs_leave_the_states_of_the_others(implementation):
    tokens = [jnp.asarray(x, jnp.float32) for x in _tokens(40)]
    ids = jnp.asarray(np.array([[1, 2], [1, 1]]).repeat(20, axis=1))
    positions = jnp.array([[10, 30], [10, 30]])
    run = jax.jit(
        lambda ids: kda(
            *tokens,
            segment_ids=ids,
            num_segments=1,
            state_positions=positions,
            implementation=implementation,
        )
    )
    output, final, states = run(ids)
    np.testing.assert_array_equal(np.isnan(output[:, :, 0, 0]), np.asarray(ids) == 2)
    assert_close(states[0, 1], final[0, 0])
    assert np.isfinite(states).all()


def test_no_tokens_leave_the_initial_state_at_every_position():
    tokens = [jnp.asarray(x, jnp.float32) for x in _tokens(0)]
    state = jnp.asarray(normal(9, B, H, K, V), jnp.float32)
    states = kda(*tokens, initial_state=state, state_positions=jnp.zeros((B, 3), int))[2]
    np.testing.assert_array_equal(states, np.stack([state] * 3, axis=1))
