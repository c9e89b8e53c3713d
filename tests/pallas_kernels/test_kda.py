import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda, kda_decode
from tests.pallas_kernels.compare import (
    DATA,
    assert_matches_definition,
    assert_same_per_device,
    normal,
)
from tests.tolerances import assert_close

# Heads, key and value sizes all differ, T is no multiple of anything.
B, T, H, K, V = 2, 83, 3, 8, 5
RUNS = 4


def _raw(length=T, rows=B):
    """Return raw q, k, v, decay logits and beta logits."""
    shapes = ((H, K), (H, K), (H, V), (H, K), (H,))
    return tuple(normal(n, rows, length, *shape) for n, shape in enumerate(shapes))


def _activate(q, k, v, log_decay, beta):
    def normalise(x):
        return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    return normalise(q), normalise(k), v, -5 * jax.nn.sigmoid(log_decay), jax.nn.sigmoid(beta)


def _op(**options):
    def op(implementation, q, k, v, log_decay, beta, *state):
        return kda(
            *_activate(q, k, v, log_decay, beta),
            initial_state=state[0] if state else None,
            implementation=implementation,
            **options,
        )

    return op


def _ids():
    """Runs in the middle of a chunk, absent tokens everywhere, an id used twice, an empty row."""
    ids = np.zeros((3, T), np.int32)
    ids[0] = np.repeat([3, 0, 3, 7, 2], [20, 9, 6, 1, 47])
    ids[0, 60:64] = 0
    ids[1] = np.repeat([0, 5, 9, 5, 0], [11, 5, 30, 16, 21])
    return jnp.asarray(ids)


@pytest.mark.parametrize("log_decay_min", [None, -5.0])
def test_kda_with_state_matches_definition(log_decay_min):
    operands = (*_raw(), normal(9, B, H, K, V))
    (output, state), _ = assert_matches_definition(
        _op(log_decay_min=log_decay_min, scale=0.7), operands
    )
    assert output.shape == (B, T, H, V) and state.shape == (B, H, K, V)


def test_kda_in_bfloat16_matches_definition():
    (output, state), _ = assert_matches_definition(_op(log_decay_min=-5.0), _raw(), "bfloat16")
    assert output.dtype == jnp.bfloat16 and state.dtype == jnp.float32


@pytest.mark.parametrize("log_decay_min", [None, -5.0])
def test_kda_with_segments_matches_definition(log_decay_min):
    operands = (*_raw(rows=3), normal(9, 3, H, K, V))
    (output, state), gradients = assert_matches_definition(
        _op(log_decay_min=log_decay_min, segment_ids=_ids()), operands
    )
    absent = np.asarray(_ids()) == 0
    assert np.all(np.asarray(output)[absent] == 0)
    for gradient in gradients[:5]:
        assert np.all(np.asarray(gradient)[absent] == 0)
    assert_close(state[2], operands[-1][2], name="state of a row without tokens")


def test_kda_with_state_per_segment_matches_definition_and_single_runs():
    operands = (*_raw(rows=3), normal(9, 3, RUNS, H, K, V))
    op = _op(log_decay_min=-5.0, segment_ids=_ids(), num_segments=RUNS)
    (output, state), _ = assert_matches_definition(op, operands)
    # Row 1 has runs at 11:16, 16:46 and 46:62; its fourth state is returned as it came.
    run = [jnp.asarray(x[1:2, 16:46], jnp.float32) for x in operands[:5]]
    alone, alone_state = kda(
        *_activate(*run), initial_state=jnp.float32(operands[5][1:2, 1]), implementation="reference"
    )
    assert_close(output[1:2, 16:46], alone)
    assert_close(state[1:2, 1], alone_state)
    assert_close(state[1, 3], operands[5][1, 3])


def test_kda_without_ids_uses_the_first_of_several_states():
    arrays = [jnp.asarray(x, jnp.float32) for x in _activate(*_raw(20))]
    states = jnp.asarray(normal(9, B, 2, H, K, V), jnp.float32)
    _, single = kda(*arrays, initial_state=states[:, 0], implementation="reference")
    for implementation in ("reference", "xla"):
        _, state = kda(*arrays, initial_state=states, num_segments=2, implementation=implementation)
        assert_close(state[:, 0], single)
        assert_close(state[:, 1], states[:, 1])


def test_kda_xla_in_float64_matches_definition_to_rounding():
    with jax.enable_x64(True):
        operands = (*_raw(rows=3), normal(9, 3, H, K, V))
        results = []
        for implementation in ("reference", "xla"):

            def loss(operands, implementation=implementation):
                output, state = _op(segment_ids=_ids())(implementation, *operands)
                return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(state))

            results.append(jax.jit(jax.grad(loss))(tuple(map(jnp.asarray, operands))))
        for n, (exact, actual) in enumerate(zip(*results, strict=True)):
            assert actual.dtype == jnp.float64
            assert_close(actual, exact, "float64", gradient=True, name=f"gradient {n}")


def test_absent_tokens_may_hold_nan():
    ids = _ids()
    absent = np.asarray(ids) == 0
    clean = [jnp.asarray(x, jnp.float32) for x in _activate(*_raw(rows=3))]
    poisoned = [
        jnp.where(absent.reshape(absent.shape + (1,) * (x.ndim - 2)), jnp.nan, x) for x in clean
    ]

    @jax.jit
    def gradients(arrays):
        def loss(arrays):
            output, state = kda(*arrays, segment_ids=ids, log_decay_min=-5.0)
            return jnp.sum(output**2) + jnp.sum(state**2)

        return jax.value_and_grad(loss)(arrays)

    for actual, expected in zip(
        jax.tree.leaves(gradients(poisoned)), jax.tree.leaves(gradients(clean)), strict=True
    ):
        assert_close(actual, expected)


def test_kda_split_and_decoded_equals_one_pass():
    arrays = [jnp.asarray(x, jnp.float32) for x in _activate(*_raw(200))]
    run = jax.jit(functools.partial(kda, log_decay_min=-5.0))
    whole, final = run(*arrays)
    state, outputs = jnp.zeros((B, H, K, V)), []
    for start, end in ((0, 64), (64, 128), (128, 197)):
        output, state = run(*(x[:, start:end] for x in arrays), initial_state=state)
        outputs.append(output)
    for token in range(197, 199):
        output, state = kda_decode(*(x[:, token] for x in arrays), state)
        assert output.shape == (B, H, V)
        outputs.append(output[:, None])
    output, state = kda_decode(*(x[:, 199:] for x in arrays), state)
    outputs.append(output)
    assert_close(jnp.concatenate(outputs, axis=1), whole)
    assert_close(state, final)


def test_state_is_key_major():
    q, zero_key = jnp.array([[[[1.0, 10.0]]]]), jnp.zeros((1, 1, 1, 2))
    token = (q, zero_key, jnp.zeros((1, 1, 1, 3)), zero_key, jnp.ones((1, 1, 1)))
    state = jnp.array([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]])
    for implementation in ("reference", "xla"):
        output, _ = kda(*token, scale=1.0, initial_state=state, implementation=implementation)
        np.testing.assert_array_equal(output.ravel(), [41.0, 52.0, 63.0])
    np.testing.assert_array_equal(kda_decode(*token, state, scale=1.0)[0].ravel(), [41, 52, 63])


def test_no_tokens_return_the_initial_state():
    empty = [jnp.asarray(x[:, :0], jnp.float32) for x in _raw()]
    state = jnp.asarray(normal(9, B, H, K, V), jnp.float32)
    for implementation in ("reference", "xla"):
        output, final = kda(*empty, initial_state=state, implementation=implementation)
        assert output.shape == (B, 0, H, V)
        np.testing.assert_array_equal(final, state)
    assert not np.any(kda(*empty)[1])


def test_kda_on_two_devices_matches_one():
    ids = np.asarray(_ids())[:2]

    def function(q, k, v, log_decay, beta, ids):
        arrays = _activate(q, k, v, log_decay, beta)
        return kda(*arrays, segment_ids=ids, log_decay_min=-5.0)

    assert_same_per_device(function, (*_raw(), ids), [DATA] * 6, [DATA] * 2)


def test_more_runs_than_states_are_refused_or_poisoned():
    arrays = [jnp.asarray(x, jnp.float32) for x in _activate(*_raw(rows=3))]
    with pytest.raises(ValueError, match="has 3 runs of real tokens, more than num_segments=2"):
        kda(*arrays, segment_ids=_ids(), num_segments=2)
    for implementation in ("reference", "xla"):
        output, state = jax.jit(
            lambda ids, implementation=implementation: kda(
                *arrays, segment_ids=ids, num_segments=2, implementation=implementation
            )
        )(_ids())
        np.testing.assert_array_equal(np.isnan(output[0, :, 0, 0]), np.asarray(_ids()[0] == 2))
        assert np.isfinite(state).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": jnp.zeros((B, T, H, K + 1))}, ValueError, r"k has shape \(2, 83, 3, 9\); expected"),
        ({"v": jnp.zeros((B, T + 1, H, V))}, ValueError, r"v has shape \(2, 84, 3, 5\)"),
        ({"beta": jnp.zeros((B, T, H, K))}, ValueError, r"beta has shape .* expected \[B, T, H\]"),
        ({"log_decay": jnp.zeros((B, T, H))}, ValueError, "log_decay has shape"),
        ({"q": jnp.zeros((B, T, H, K), int)}, TypeError, "q has dtype int32"),
        ({"initial_state": jnp.zeros((B, H, V, K))}, ValueError, "keys before values"),
        ({"num_segments": 0}, ValueError, "num_segments=0 must be at least 1"),
        (
            {"num_segments": 2, "initial_state": jnp.zeros((B, H, K, V))},
            ValueError,
            r"\[B, num_segments, H, K, V\]",
        ),
        ({"segment_ids": jnp.ones((B, T))}, TypeError, "segment_ids has dtype float32"),
        (
            {"segment_ids": jnp.ones((B, T + 1), int)},
            ValueError,
            r"segment_ids has shape \(2, 84\)",
        ),
        ({"log_decay_min": 0.5}, ValueError, "log_decay_min=0.5 must be a finite number <= 0"),
        ({"log_decay_min": -np.inf}, ValueError, "or None when the decay has no bound"),
        ({"implementation": "cuda"}, ValueError, "'cuda' is unknown; use None or one of"),
        ({"implementation": "mosaic_tpu"}, NotImplementedError, "it runs on tpu, and this program"),
    ],
)
def test_bad_input_is_named(change, error, message):
    names = ("q", "k", "v", "log_decay", "beta")
    arguments = {name: jnp.asarray(x, jnp.float32) for name, x in zip(names, _raw(), strict=True)}
    arguments |= change
    positional = [arguments.pop(name) for name in names]
    with pytest.raises(error, match=message):
        kda(*positional, **arguments)


def test_bad_decode_input_is_named():
    q, k, v, log_decay, beta = (jnp.asarray(x, jnp.float32) for x in _raw())
    state = jnp.zeros((B, H, K, V))
    with pytest.raises(ValueError, match="q has 83 tokens; it takes one to 8, use kda for more"):
        kda_decode(q, k, v, log_decay, beta, state)
    with pytest.raises(ValueError, match=r"expected \[B, H, K\] or \[B, 1, H, K\]"):
        kda_decode(q[0, 0], k, v, log_decay, beta, state)
    with pytest.raises(ValueError, match=r"kda_decode: state has shape \(2, 3, 5, 8\)"):
        kda_decode(*(x[:, 0] for x in (q, k, v, log_decay, beta)), state.swapaxes(-1, -2))
