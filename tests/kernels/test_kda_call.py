"""What `kda` builds on its kernels: states at positions, rows in pieces, transitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KDAGate, interpreted, kda, kda_transition
from tests.kernels.errors import assert_within
from tests.pallas_kernels.compare import normal

T, H, K = 70, 1, 128
# Implementation -> interpreter and dtype of the tokens.
KERNELS = {"mosaic_tpu": ("tpu", "float32"), "mosaic_gpu": ("gpu", "bfloat16")}
IDS = np.array([[1, 0, 2, 3]]).repeat([20, 5, 30, 15], axis=1)
POSITIONS = np.array([[0, 5, 22, 40, T]])


def _operands(dtype):
    tokens = [normal(n, 1, T, H, K) for n in range(4)] + [normal(4, 1, T, H)]
    # Decays of about e^-0.1, so that pieces and spans meet in the results.
    parameters = [np.zeros(H), normal(5, H, K) - 4]
    state = normal(9, 1, H, K, K)
    return [jnp.asarray(x, dtype) for x in tokens], *(
        jnp.asarray(x, jnp.float32) for x in (*parameters, state)
    )


def _run(implementation, tokens, A_log, dt_bias, state, **options):
    if "num_segments" in options:
        state = jnp.stack([state] * options["num_segments"], axis=1)
    return kda(
        *tokens, gate=KDAGate(A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0), beta_logits=True,
        normalize_qk=True, initial_state=state, implementation=implementation, **options,
    )  # fmt: skip


def _transition(implementation, tokens, A_log, dt_bias, state):
    del state
    return kda_transition(
        *tokens[1:], gate=KDAGate(A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0),
        beta_logits=True, normalize_k=True, implementation=implementation,
    )  # fmt: skip


def _assert_as_definition(implementation, kernel, definition):
    mode, dtype = KERNELS[implementation]
    operands = _operands(dtype)
    with interpreted(mode):
        actual = jax.jit(functools.partial(kernel, implementation))(*operands)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), operands)
        expected = jax.jit(functools.partial(definition, "reference"))(*double)
    for n, (one, two) in enumerate(zip(actual, expected, strict=True)):
        assert_within(one, two, dtype, name=f"result {n}")


def test_states_at_positions_of_packed_rows_are_right_on_tpu():
    run = functools.partial(
        _run, state_positions=POSITIONS, segment_ids=jnp.asarray(IDS), num_segments=3
    )
    _assert_as_definition("mosaic_tpu", run, run)


@pytest.mark.slow
@pytest.mark.parametrize("segmented", [False, True])
def test_states_at_positions_are_right_on_gpu(segmented):
    packed = {"segment_ids": jnp.asarray(IDS), "num_segments": 3} if segmented else {}
    run = functools.partial(_run, state_positions=POSITIONS, **packed)
    _assert_as_definition("mosaic_gpu", run, run)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("segmented", [False, True])
def test_rows_in_pieces_are_right(implementation, segmented):
    whole = functools.partial(_run, segment_ids=jnp.asarray(IDS) if segmented else None)
    _assert_as_definition(implementation, functools.partial(whole, context_chunks=2), whole)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", KERNELS)
def test_transitions_are_right(implementation):
    _assert_as_definition(implementation, _transition, _transition)
