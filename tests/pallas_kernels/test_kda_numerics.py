"""Where chunked forms of the delta rule go wrong: similar keys, strong decay, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda, kda_gate
from pallas_kernels.kda.schedule import choose_schedule
from pallas_kernels.kda.triangular import invert_unit_lower
from tests.pallas_kernels.compare import normal
from tests.tolerances import assert_close


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inverse_of_similar_keys_with_slow_decay_is_exact(size, dtype):
    keys = _unit(_unit(normal(0, 1, 32)) + 0.05 * _unit(normal(1, size, 32)))
    keys = np.asarray(jnp.asarray(keys, dtype), np.float64)
    steps = np.arange(size)
    decay = np.exp(-0.001 * (steps[:, None] - steps))
    matrix = np.tril(0.95 * (keys @ keys.T) * decay, -1)
    actual = jax.jit(invert_unit_lower)(jnp.asarray(matrix, jnp.float32))
    exact = np.linalg.inv(np.eye(size) + matrix)
    assert np.max(np.abs(np.tril(exact, -1))) <= 1
    assert np.max(np.abs(np.tril(np.asarray(actual) - exact, -1))) <= 1e-5


@functools.partial(jax.jit, static_argnums=(1, 2))
def _results(arrays, implementation, log_decay_min):
    """Return output, state and gradients of a loss through the normalisation of q and k."""

    def loss(arrays):
        q, k, v, log_decay, beta, state = arrays
        q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        output, state = kda(
            q, k, v, log_decay, beta,
            initial_state=state, log_decay_min=log_decay_min, implementation=implementation,
        )  # fmt: skip
        return jnp.sum(output) + jnp.sum(jnp.sin(state)), (output, state)

    (_, values), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return (*values, *gradients)


def _assert_as_exact(log_decay, beta, log_decay_min, *, keys=None):
    length, key_dim = log_decay.shape[1], log_decay.shape[3]
    shape = (1, length, 2, key_dim)
    keys = normal(1, *shape) if keys is None else keys
    arrays = (normal(0, *shape), keys, normal(2, *shape), log_decay, beta)
    arrays = [np.float32(x) for x in (*arrays, normal(3, 1, 2, key_dim, key_dim))]
    actual = _results(arrays, "xla", log_decay_min)
    with jax.enable_x64(True):
        exact = _results([np.float64(x) for x in arrays], "reference", None)
    for n, (one, two) in enumerate(zip(actual, exact, strict=True)):
        assert_close(one, two, gradient=n >= 2, name=f"result {n}")


@pytest.mark.parametrize(("length", "log_decay_min"), [(100, None), (100, -5.0), (128, -5.0)])
def test_gradients_are_finite_and_right_for_decays_down_to_the_bound(length, log_decay_min):
    random = np.random.default_rng(0)
    log_decay = random.uniform(-5, 0, (1, length, 2, 16))
    _assert_as_exact(log_decay, random.uniform(0, 1, (1, length, 2)), log_decay_min)


@pytest.mark.parametrize("log_decay_min", [None, -5.0])
def test_every_decay_at_the_bound_is_right(log_decay_min):
    _assert_as_exact(np.full((1, 100, 2, 16), -5.0), np.ones((1, 100, 2)), log_decay_min)


@pytest.mark.parametrize("log_decay_min", [None, -5.0])
def test_similar_keys_without_decay_are_right(log_decay_min):
    keys = normal(0, 1, 1, 2, 16) + 0.01 * normal(1, 1, 100, 2, 16)
    log_decay = np.full((1, 100, 2, 16), -0.001)
    _assert_as_exact(log_decay, np.full((1, 100, 2), 0.95), log_decay_min, keys=keys)


def test_unbounded_decay_is_right_where_channels_differ_by_orders_of_magnitude():
    random = np.random.default_rng(1)
    log_decay = -(10.0 ** random.uniform(-4, 4, (1, 100, 2, 16)))
    log_decay[:, 30:60, :, :4] = -1e4
    log_decay[:, 30:60, :, 4:8] = 0
    _assert_as_exact(log_decay, random.uniform(0, 1, (1, 100, 2)), None)


def test_infinite_decay_forgets_everything_before():
    arrays = [np.float32(x) for x in (normal(n, 1, 40, 2, 8) for n in range(3))]
    log_decay = np.full((1, 40, 2, 8), -0.1, np.float32)
    log_decay[:, 21] = -np.inf
    beta = np.ones((1, 40, 2), np.float32) / 8

    @jax.jit
    def run(log_decay):
        def loss(log_decay):
            output, _ = kda(*arrays, log_decay, beta)
            return jnp.sum(output), output

        return jax.grad(loss, has_aux=True)(log_decay)

    gradient, output = run(log_decay)
    after = [x[:, 21:] for x in (*arrays, log_decay, beta)]
    assert_close(output[:, 21:], kda(*after, implementation="reference")[0])
    assert np.isfinite(gradient).all() and not np.any(gradient[:, 21])


def test_gate_gradient_stays_right_for_huge_rates():
    # The gradient of A_log multiplies that of the decay by the decay itself, here up to 1e5.
    shape = (1, 64, 2, 8)
    logits, rest = normal(5, *shape), [normal(n, *shape) for n in range(3)]
    bias = np.where(np.arange(8) < 4, 1.0, -12.0) * np.ones((2, 1))
    A_log, beta = np.array([11.0, 10.0]), np.full(shape[:3], 0.1)

    def gradient(implementation, dtype):
        cast = [jnp.asarray(x, dtype) for x in (logits, A_log, bias, *rest, beta)]

        def loss(A_log):
            logits, _, bias, q, k, v, beta = cast
            log_decay = kda_gate(logits, A_log, bias, lower_bound=None)
            return jnp.sum(kda(q, k, v, log_decay, beta, implementation=implementation)[0] ** 2)

        return jax.jit(jax.grad(loss))(cast[1])

    actual = gradient("xla", jnp.float32)
    with jax.enable_x64(True):
        exact = gradient("reference", jnp.float64)
    assert_close(actual, exact, gradient=True)


def test_promise_selects_the_bounded_split_only_where_it_holds():
    assert choose_schedule(4096, -5.0).bounded and choose_schedule(4096, -0.1).bounded
    assert not choose_schedule(4096, -5.1).bounded and not choose_schedule(4096, None).bounded
    for length in (1, 15, 17, 100, 257):
        schedule = choose_schedule(length, -5.0)
        assert -length % schedule.group_tokens < schedule.chunk * (1 + length // 64)


@pytest.mark.parametrize("log_decay_min", [None, -5.0])
def test_memory_of_the_gradient_is_linear_in_tokens_and_of_the_size_of_the_inputs(log_decay_min):
    heads, dim = 2, 64

    def temporaries(length):
        array = jax.ShapeDtypeStruct((1, length, heads, dim), jnp.float32)
        beta = jax.ShapeDtypeStruct((1, length, heads), jnp.float32)

        def loss(*arrays):
            return jnp.sum(kda(*arrays, log_decay_min=log_decay_min)[0] ** 2)

        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))
        compiled = program.lower(array, array, array, array, beta).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    two, four = temporaries(2048), temporaries(4096)
    assert abs(four - 2 * two) <= 0.02 * four
    # Per token: the output and its gradient, stacked gradients, and K * V / 32 of state at most.
    per_token = (four - two) / 2048 / heads / 4
    assert per_token <= 4 * dim + dim * dim / 32
