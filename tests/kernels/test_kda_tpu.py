"""The TPU kernels of `kda`, interpreted, against the float64 definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KDAGate, interpreted, kda
from pallas_kernels.kda.mosaic_tpu import KDATiles
from pallas_kernels.tiles import with_tiles
from pallas_kernels.traffic import count_traffic
from tests.kernels.errors import assert_within

# Most of the time goes into compiling interpreted kernels.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

NAMES = ("output", "state", "dq", "dk", "dv", "d_log_decay", "d_beta", "d_initial_state")


def make_arrays(
    tokens, dtype="float32", *, rows=1, heads=1, dims=(128, 128), runs=0, gate=None, similar=None
):
    """Return operands of `kda` and cotangents of its results.

    Every log decay is `gate`, or uniform down to -5. With `similar` keys lie at that relative
    distance around a common one, and beta is 1.
    """
    random = np.random.default_rng(tokens)
    shape = (rows, tokens, heads, dims[0])
    q, k = random.normal(size=(2, *shape))
    if similar is not None:
        k = random.normal(size=(1, 1, *shape[2:])) + similar * k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, d_output = random.normal(size=(2, *shape[:3], dims[1]))
    log_decay = random.uniform(-5, 0, shape) if gate is None else np.full(shape, gate)
    beta = random.uniform(0, 1, shape[:3]) if similar is None else np.ones(shape[:3])
    state, d_state = random.normal(size=(2, rows, *((runs,) if runs else ()), heads, *dims))
    narrow, wide = (lambda x: jnp.asarray(x, dtype)), (lambda x: jnp.asarray(x, jnp.float32))
    arrays = (*map(narrow, (q, k, v)), *map(wide, (log_decay, beta, state)))
    return arrays, (narrow(d_output), wide(d_state))


def results(implementation, arrays, cotangents, **options):
    """Return outputs and gradients of all arrays."""

    def call(*arrays):
        *tokens, state = arrays
        return kda(*tokens, initial_state=state, implementation=implementation, **options)

    outputs, transpose = jax.vjp(call, *arrays)
    cotangents = tuple(c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True))
    return *outputs, *transpose(cotangents)


def definition(arrays, cotangents, **options):
    """Return what `results` should be, in float64."""
    options.pop("log_decay_min", None)
    with jax.enable_x64(True):
        arrays, cotangents = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x, np.float64)), (arrays, cotangents)
        )
        run = jit(functools.partial(results, "reference", **options))
        return run(arrays, cotangents)


def assert_right(arrays, cotangents, *, mode="tpu", decay_bound="float32 decay", **options):
    """Assert that kernel and definition agree."""
    dtype = str(arrays[0].dtype)
    with interpreted(mode):
        run = jit(functools.partial(results, "mosaic_tpu", **options))
        actual = jax.block_until_ready(run(arrays, cotangents))
    expected = definition(arrays, cotangents, **options)
    for name, one, two in zip(NAMES, actual, expected, strict=True):
        is_decay = dtype == "float32" and name in ("d_log_decay", "d_beta")
        assert_within(one, two, decay_bound if is_decay else dtype, name)
    return actual


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(129, "bfloat16"), pytest.param(17, "float32", marks=pytest.mark.slow)],
)
def test_lengths_that_are_no_multiple_of_a_chunk_are_right(tokens, dtype):
    assert_right(*make_arrays(tokens, dtype), mode="tpu_poisoned", log_decay_min=-5.0)


def test_unlike_head_sizes_and_rows_are_right():
    assert_right(*make_arrays(66, rows=2, heads=3, dims=(64, 192)), log_decay_min=-5.0)


@pytest.mark.parametrize(
    ("dtype", "similar"),
    [("bfloat16", 0.05), pytest.param("float32", 1 / 3, marks=pytest.mark.slow)],
)
def test_similar_keys_without_decay_are_right(dtype, similar):
    # Cosines of 0.998 and 0.9.
    arrays = make_arrays(128, dtype, gate=-0.001, similar=similar)
    assert_right(*arrays, log_decay_min=-5.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", [-5.0, 0.0])
def test_every_decay_at_a_bound_is_right(dtype, gate):
    options = {"decay_bound": "float32 decay at the bound", "log_decay_min": -5.0}
    assert_right(*make_arrays(200, dtype, heads=2, gate=gate), **options)


def test_unbounded_decay_is_right():
    arrays, cotangents = make_arrays(80)
    random = np.random.default_rng(0)
    log_decay = -(10.0 ** random.uniform(-4, 4, arrays[3].shape))
    log_decay[:, 30:60, :, :4] = -1e4
    arrays = (*arrays[:3], jnp.asarray(log_decay, jnp.float32), *arrays[4:])
    assert_right(arrays, cotangents)


@pytest.mark.slow
def test_infinite_decay_forgets_everything_before():
    arrays, _ = make_arrays(40)
    log_decay = arrays[3].at[:, 21].set(-jnp.inf)
    with interpreted("tpu"):
        output, _ = kda(*arrays[:3], log_decay, arrays[4], implementation="mosaic_tpu")
    after = [x[:, 21:] for x in (*arrays[:3], log_decay, arrays[4])]
    assert_within(output[:, 21:], kda(*after, implementation="reference")[0], "float32")


def _ids():
    """Runs inside a chunk and over borders, absent tokens, an id used twice, a row of one run."""
    ids = np.zeros((2, 140), np.int32)
    ids[0] = np.repeat([3, 0, 3, 7, 2], [20, 9, 6, 60, 45])
    ids[0, 120:124] = 0
    ids[1] = np.repeat([0, 5, 0], [30, 75, 35])
    return ids


@pytest.mark.parametrize("runs", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_packed_rows_are_right_whatever_absent_tokens_hold(runs):
    ids = _ids()
    arrays, cotangents = make_arrays(140, rows=2, runs=runs)
    options = {"segment_ids": jnp.asarray(ids), "num_segments": runs or None}
    absent = ids == 0
    spoiled = [
        jnp.where(absent.reshape(absent.shape + (1,) * (x.ndim - 2)), jnp.nan, x)
        for x in arrays[:5]
    ]
    with interpreted("tpu"):
        run = jit(functools.partial(results, "mosaic_tpu", log_decay_min=-5.0, **options))
        actual = run((*spoiled, arrays[5]), cotangents)
    expected = definition(arrays, cotangents, **options)
    for name, one, two in zip(NAMES, actual, expected, strict=True):
        assert_within(one, two, "float32", name)


@pytest.mark.slow
def test_segments_at_every_boundary_are_right():
    tokens = 130
    boundaries = range(1, tokens)
    arrays, cotangents = make_arrays(tokens)
    number = jnp.arange(tokens)
    with interpreted("tpu"):
        run = jit(
            lambda ids: results(
                "mosaic_tpu", arrays, cotangents, segment_ids=ids, log_decay_min=-5.0
            )
        )
        actual = [run((1 + (number >= b))[None]) for b in boundaries]
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (arrays, cotangents))
        run = jit(lambda ids: results("reference", *exact, segment_ids=ids))
        for b, found in zip(boundaries, actual, strict=True):
            wanted = run((1 + (number >= b))[None])
            for name, one, two in zip(NAMES, found, wanted, strict=True):
                assert_within(one, two, "float32 decay", f"{name}, boundary {b}")


@pytest.mark.parametrize("lower_bound", [-5.0, pytest.param(None, marks=pytest.mark.slow)])
def test_fused_activations_are_right(lower_bound):
    (q, k, v, log_decay, beta, state), (d_output, _) = make_arrays(70, heads=2, dims=(96, 128))
    operands = (3 * q, 2 * k, v, log_decay + 2.5, 4 * beta - 2, state)
    operands += (jnp.asarray([0.3, -0.5]), 0.3 * log_decay[0, 0])

    def gradients(implementation, operands, d_output):
        def loss(operands):
            *tokens, state, A_log, dt_bias = operands
            gate = KDAGate(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
            output, state = kda(
                *tokens, gate=gate, beta_logits=True, normalize_qk=True, initial_state=state,
                implementation=implementation,
            )  # fmt: skip
            return jnp.sum(output * d_output) + jnp.sum(jnp.sin(state))

        return jax.value_and_grad(loss)(operands)

    with interpreted("tpu"):
        _, actual = jit(functools.partial(gradients, "mosaic_tpu"))(operands, d_output)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (operands, d_output))
        _, expected = jit(functools.partial(gradients, "reference"))(*exact)
    names = ("q", "k", "v", "logits", "beta logits", "state", "A_log", "dt_bias")
    for name, one, two in zip(names, actual, expected, strict=True):
        # Of the gate and of beta: as the gradients of log_decay and beta that they stem from.
        exact = name in ("q", "k", "v", "state")
        assert_within(one, two, "float32" if exact else "float32 decay", name)


def test_states_at_positions_and_their_gradients_are_right():
    arrays, _ = make_arrays(140, rows=2, runs=3)
    positions = jnp.asarray([[0, 10, 64, 64, 100], [31, 32, 105, 130, 140]])

    def gradients(implementation, arrays):
        def loss(arrays):
            *tokens, state = arrays
            output, final, states = kda(
                *tokens, initial_state=state, segment_ids=jnp.asarray(_ids()), num_segments=4,
                state_positions=positions, implementation=implementation,
            )  # fmt: skip
            total = jnp.sum(jnp.sin(output)) + jnp.sum(jnp.sin(final)) + jnp.sum(jnp.cos(states))
            return total, (output, final, states)

        (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(arrays)
        return *values, *gradient

    arrays = (*arrays[:5], jnp.concatenate([arrays[5], arrays[5][:, :1]], axis=1))
    with interpreted("tpu"):
        actual = jit(functools.partial(gradients, "mosaic_tpu"))(arrays)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        expected = jit(functools.partial(gradients, "reference"))(exact)
    for n, (one, two) in enumerate(zip(actual, expected, strict=True)):
        assert_within(one, two, "float32 decay" if n in (6, 7) else "float32", f"result {n}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tpu_poisoned", "tpu_races"])
def test_heads_and_chunks_do_not_race(mode):
    with with_tiles(kda_forward_tpu=KDATiles(heads=1), kda_backward_tpu=KDATiles(heads=1)):
        assert_right(*make_arrays(200, heads=2), mode=mode, log_decay_min=-5.0)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(128, 256), (256, 128), (256, 256)])
def test_large_heads_are_right(dims):
    assert_right(*make_arrays(130, heads=2, dims=dims), log_decay_min=-5.0)


@functools.cache
def _definition_of_300():
    """Return operands, cotangents, and a function: ids, d_output -> what `results` should be."""
    arrays, cotangents = make_arrays(300)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        d_state = jnp.asarray(np.asarray(cotangents[1], np.float64))
        run = jit(
            lambda ids, d_output: results("reference", exact, (d_output, d_state), segment_ids=ids)
        )
    return arrays, cotangents, run


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 301, 50))
def test_all_lengths_are_right(first):
    arrays, (d_output, d_state), run = _definition_of_300()
    for tokens in range(first, first + 50):
        shorter = (*(x[:, :tokens] for x in arrays[:5]), arrays[5])
        with interpreted("tpu"):
            actual = jit(functools.partial(results, "mosaic_tpu", log_decay_min=-5.0))(
                shorter, (d_output[:, :tokens], d_state)
            )
        with jax.enable_x64(True):
            ids = (jnp.arange(300) < tokens)[None].astype(jnp.int32)
            expected = run(ids, jnp.asarray(np.asarray(d_output, np.float64)))
        for name, one, two in zip(NAMES, actual, expected, strict=True):
            two = two if "state" in name else two[:, :tokens]
            bound = "float32 decay" if name in ("d_log_decay", "d_beta") else "float32"
            assert_within(one, two, bound, f"{name} of {tokens} tokens")


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 257, 300])
def test_lengths_around_tiles_and_chunks_are_right_in_bfloat16(tokens):
    assert_right(*make_arrays(tokens, "bfloat16"), log_decay_min=-5.0)


def _k3_specs(raw):
    shape = jax.ShapeDtypeStruct
    cells = (1, 8192, 96)
    row = shape((*cells, 128), jnp.bfloat16)
    gate = row if raw else shape(row.shape, jnp.float32)
    state = shape((1, 96, 128, 128), jnp.float32)
    return row, row, row, gate, shape(cells, jnp.float32), state


def _traffic(raw, gradient):
    gate = KDAGate(A_log=jnp.zeros(96), dt_bias=jnp.zeros((96, 128)), lower_bound=-5.0)
    options = {"gate": gate} if raw else {"log_decay_min": -5.0}

    def run(*arrays):
        *tokens, state = arrays
        return kda(*tokens, initial_state=state, implementation="mosaic_tpu", **options)

    def train(*arrays):
        outputs, transpose = jax.vjp(run, *arrays)
        return transpose(outputs)

    with interpreted("tpu"):
        return count_traffic(train if gradient else run, *_k3_specs(raw))


def test_traffic_is_as_estimated_and_near_the_least():
    (inference,) = _traffic(raw=True, gradient=False)
    forward, backward = _traffic(raw=True, gradient=True)
    for call, most in ((inference, 1.1e9), (forward, 1.45e9), (backward, 2.3e9)):
        assert call.bytes == call.cost_estimate.bytes_accessed, call.name
        assert call.bytes <= most, call.name


def test_what_the_kernel_does_not_take_is_named():
    arrays, _ = make_arrays(4, dims=(264, 128))
    with interpreted("tpu"):
        with pytest.raises(NotImplementedError, match="q has head size 264; the kernel takes"):
            kda(*arrays[:5], implementation="mosaic_tpu")
        halves = [x.astype(jnp.float16) for x in arrays[:5]]
        with pytest.raises(NotImplementedError, match="q has dtype float16"):
            kda(*halves, implementation="mosaic_tpu")
