"""The Hopper kernels of KDA, interpreted, against the definition in float64."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import KDAGate, interpreted, kda
from pallas_kernels.kda.mosaic_gpu_cost import gradients_cost, prepare_cost, states_cost
from tests.kernels.errors import assert_within

# Most of the time goes into compiling interpreted kernels.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

NAMES = ("output", "state", "dq", "dk", "dv", "d_log_decay", "d_beta", "d_initial_state")


def make_arrays(tokens, *, heads=1, dims=(64, 64), runs=0, gate=None, similar=None):
    """Return operands of `kda` and cotangents of its results.

    Every log decay is `gate`, or uniform down to -5. With `similar` keys lie at that relative
    distance around a common one, and beta is 1.
    """
    random = np.random.default_rng(tokens)
    shape = (1, tokens, heads, dims[0])
    q, k = random.normal(size=(2, *shape))
    if similar is not None:
        k = random.normal(size=dims[0]) + similar * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, d_output = random.normal(size=(2, *shape[:3], dims[1]))
    log_decay = random.uniform(-5, 0, shape) if gate is None else np.full(shape, gate)
    beta = random.uniform(0, 1, shape[:3]) if similar is None else np.ones(shape[:3])
    state, d_state = random.normal(size=(2, 1, *((runs,) if runs else ()), heads, *dims))
    narrow, wide = (lambda x: jnp.asarray(x, jnp.bfloat16)), (lambda x: jnp.asarray(x, jnp.float32))
    arrays = (*map(narrow, (q, k, v)), *map(wide, (log_decay, beta, state)))
    return arrays, (narrow(d_output), wide(d_state))


def results(implementation, options, arrays, cotangents):
    """Return outputs and gradients of all arrays."""

    def call(*arrays):
        *tokens, state = arrays
        return kda(*tokens, initial_state=state, implementation=implementation, **options)

    outputs, transpose = jax.vjp(call, *arrays)
    cotangents = tuple(c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True))
    return *outputs, *transpose(cotangents)


def assert_right(arrays, cotangents, *, mode="gpu", **options):
    """Assert that the results and gradients of kernels and definition agree."""
    with interpreted(mode):
        run = jit(functools.partial(results, "mosaic_gpu", options | {"log_decay_min": -5.0}))
        actual = jax.block_until_ready(run(arrays, cotangents))
    with jax.enable_x64(True):
        doubles = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x, np.float64)), (arrays, cotangents)
        )
        expected = jit(functools.partial(results, "reference", options))(*doubles)
    for name, one, two in zip(NAMES, actual, expected, strict=True):
        assert_within(one, two, "bfloat16", name)


def test_lengths_that_are_no_multiple_of_a_chunk_are_right():
    assert_right(*make_arrays(66, dims=(64, 128)))


@pytest.mark.slow
def test_packed_rows_with_absent_tokens_are_right():
    ids = [0] * 3 + [1] * 20 + [0] * 2 + [1] * 10 + [2] * 20 + [3] * 15
    (q, *arrays), cotangents = make_arrays(70)
    q = q.at[:, 1].set(jnp.nan)
    assert_right((q, *arrays), cotangents, segment_ids=jnp.asarray([ids]))


@pytest.mark.slow
def test_states_of_each_run_are_right():
    ids = jnp.asarray([[1] * 70 + [0] * 3 + [2] * 5 + [3] * 65 + [0] * 9])
    assert_right(*make_arrays(152, runs=3), segment_ids=ids, num_segments=3)


@pytest.mark.slow
@pytest.mark.parametrize("gate", [-5.0, 0.0])
def test_every_decay_at_a_bound_is_right(gate):
    assert_right(*make_arrays(65, dims=(128, 64), gate=gate))


@pytest.mark.slow
@pytest.mark.parametrize("tokens, similar", [(80, 0.05), (80, 1 / 3), (200, 0.15)])
def test_similar_keys_without_decay_are_right(tokens, similar):
    """Their differences are small: rounding of what cancels must not drown them."""
    assert_right(*make_arrays(tokens, gate=-0.001, similar=similar))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 16, 63, 64, 129])
def test_lengths_around_tiles_and_chunks_are_right(tokens):
    assert_right(*make_arrays(tokens))


@pytest.mark.slow
def test_head_sizes_that_are_no_multiple_of_a_block_are_right():
    assert_right(*make_arrays(65, heads=2, dims=(72, 40)))


@pytest.mark.slow
def test_raw_operands_and_states_at_positions_are_right():
    (q, k, v, logits, beta, state), _ = make_arrays(130)
    gate = KDAGate(A_log=jnp.zeros(1), dt_bias=jnp.ones((1, 64)), lower_bound=-5.0)
    options = {"gate": gate, "beta_logits": True, "normalize_qk": True}
    options |= {"initial_state": state, "state_positions": jnp.asarray([[0, 70, 100]])}
    with interpreted("gpu"):
        actual = kda(q, k, v, logits, beta, implementation="mosaic_gpu", **options)
    expected = kda(q, k, v, logits, beta, implementation="reference", **options)
    for name, one, two in zip(("output", "state", "states"), actual, expected, strict=True):
        assert_within(one, two, "bfloat16", name)


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"), reason="this jax interprets no asynchrony"
)
def test_no_race_is_found():
    assert_right(*make_arrays(130, heads=2), mode="gpu_races")


def test_what_the_kernels_do_not_take_is_named():
    (q, k, v, log_decay, beta, _), _ = make_arrays(4)
    with interpreted("gpu"):
        run = functools.partial(kda, implementation="mosaic_gpu")
        with pytest.raises(NotImplementedError, match="q has dtype float32; the kernel takes"):
            run(q.astype(jnp.float32), k, v, log_decay, beta, log_decay_min=-5.0)
        with pytest.raises(NotImplementedError, match="log_decay_min=None; the kernel takes"):
            run(q, k, v, log_decay, beta)
        wide = jnp.zeros((1, 4, 1, 192), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match="q has head size 192; the kernel takes up"):
            run(wide, wide, v, wide, beta, log_decay_min=-5.0)


def test_cost_at_the_shapes_of_k3_is_as_published():
    def spec(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    tokens, state = (1, 8192, 96), spec(1, 1, 96, 128, 128, dtype=jnp.float32)
    raw, values = spec(*tokens, 128), spec(*tokens, 128)
    prepared = prepare_cost(raw, parts=1, marked=False)
    # Read: q, k, decay and beta. Written: four arrays like q, three squares, totals.
    row, square = 8192 * 96 * 128 * 2, 8192 * 96 * 64 * 2
    betas, totals, states = 8192 * 96 * 4, 128 * 96 * 128 * 4, 128 * 96 * 128 * 128 * 2
    assert prepared.bytes_accessed == 7 * row + betas + 3 * square + totals
    # Both halves of the value channels read what was prepared.
    forward = states_cost(values, state, keep=True)
    read_twice = 4 * row + 3 * square + betas + totals
    assert forward.bytes_accessed == 2 * read_twice + 3 * row + states + 2 * state.size * 4
    gradients = gradients_cost(raw, 128, parts=1, marked=False)
    assert gradients.flops == 128 * 96 * 2 * (10 + 5 + 10 + 8 + 4) * 2 * 64**3


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"), reason="this jax multiplies outside of wgmma"
)
def test_cost_counts_every_product(monkeypatch):
    callbacks = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    products, original = [], callbacks.wgmma

    def count(**arguments):
        products.append(1)
        return original(**arguments)

    monkeypatch.setattr(callbacks, "wgmma", count)
    arrays, _ = make_arrays(128, dims=(128, 128))
    *tokens, state = arrays
    with interpreted("gpu"):
        kda(*tokens, initial_state=state, log_decay_min=-5.0, implementation="mosaic_gpu")
    expected = prepare_cost(tokens[3], parts=2, marked=False).flops
    expected += states_cost(tokens[2], state[:, None], keep=False).flops
    assert 2 * 64**3 * len(products) == expected
