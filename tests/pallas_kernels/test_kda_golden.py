"""The released operator's golden cases: values and gradients through gate and normalisation."""

import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_kernels import kda, kda_gate

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "kda_ops"
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
FORMS = {"reference": ("reference", None), "xla": ("xla", None), "xla_bounded": ("xla", -5.0)}
# Cases are embedded in arrays of two rows and heads and one length, to share compilations; what is
# added is absent (segment id 0) or of no consequence (an unused head).
LENGTH = 272


def _load(name):
    cases, arrays, tolerance = {}, {}, None
    for part in ("lengths", "extremes"):
        meta = json.loads((FOLDER / f"{part}.json").read_text())
        if name in meta["cases"]:
            cases, tolerance = meta["cases"][name], meta["tolerance"]
            stored = load_file(FOLDER / f"{part}.safetensors")
            arrays = {
                key.removeprefix(f"{name}."): value
                for key, value in stored.items()
                if key.startswith(f"{name}.")
            }
    return cases, arrays, tolerance


def _names():
    return [
        name
        for part in ("lengths", "extremes")
        for name in json.loads((FOLDER / f"{part}.json").read_text())["cases"]
    ]


@functools.partial(jax.jit, static_argnames=("lower_bound", "form", "num_segments"))
def _values_and_gradients(inputs, segment_ids, d_output, d_state, lower_bound, form, num_segments):
    implementation, log_decay_min = FORMS[form]

    def loss(inputs):
        q, k, v, g, beta, A_log, dt_bias, initial_state = inputs

        def normalise(x):
            return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

        output, state = kda(
            normalise(q),
            normalise(k),
            v,
            kda_gate(g, A_log, dt_bias, lower_bound=lower_bound),
            jax.nn.sigmoid(beta),
            initial_state=initial_state.swapaxes(-1, -2),
            segment_ids=segment_ids,
            num_segments=num_segments,
            log_decay_min=log_decay_min,
            implementation=implementation,
        )
        state = state.swapaxes(-1, -2)  # golden states are value-major
        return jnp.sum(output * d_output) + jnp.sum(state * d_state), (output, state)

    return jax.value_and_grad(loss, has_aux=True)(inputs)


def _embed(array, *sizes):
    return np.pad(array, [(0, size - have) for size, have in zip(sizes, array.shape, strict=True)])


def _check(name, form, *, embed):
    case, arrays, tolerance = _load(name)
    rows, length, heads, dim = case["B"], case["T"], case["H"], case["K"]
    B, H, T = rows, heads, length
    packed = case["cu_seqlens"] is not None
    if embed:
        B, H, T = 2, 2, LENGTH
    bounds = case["cu_seqlens"] or [0, length]
    num_segments = len(bounds) - 1 if packed else None
    ids = np.zeros((B, T), np.int32)
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        ids[:rows, start:end] = number + 1
    state_shape = (num_segments or rows, heads, dim, dim)
    states = [arrays.get("initial_state", np.zeros(state_shape)), arrays["dfinal_state"]]
    if packed:  # golden [N, H, V, K] is one row of N segments
        states = [_embed(x[None], B, num_segments, H, dim, dim) for x in states]
    else:
        states = [_embed(x, B, H, dim, dim) for x in states]
    per_token = [_embed(arrays[x], B, T, H, dim) for x in ("q", "k", "v", "g", "do")]
    A_log, dt_bias = _embed(arrays["A_log"], H), _embed(arrays["dt_bias"].reshape(-1, dim), H, dim)
    *per_token, d_output = per_token
    inputs = (*per_token, _embed(arrays["beta"], B, T, H), A_log, dt_bias, states[0])
    inputs = tuple(jnp.asarray(x, jnp.float32) for x in inputs)
    (_, (output, state)), gradients = _values_and_gradients(
        inputs,
        jnp.asarray(ids) if embed or packed else None,
        d_output,
        np.float32(states[1]),
        lower_bound=case["lower_bound"],
        form=form,
        num_segments=num_segments,
    )

    def within(actual, expected, atol, rtol, what):
        actual = np.asarray(actual, np.float64)
        if packed and actual.ndim == 5:
            actual = actual[0]
        actual = actual[tuple(slice(size) for size in expected.shape)]
        excess = np.abs(actual - expected) - (atol + rtol * np.abs(expected))
        assert np.all(excess <= 0), f"{name} {what}: off by {np.max(excess):.3e} beyond tolerance"

    within(output, arrays["o"], tolerance["o_atol"], tolerance["o_rtol"], "o")
    within(
        state,
        arrays["final_state"],
        tolerance["state_atol"],
        tolerance["state_rtol"],
        "final_state",
    )
    for what, gradient in zip(INPUTS, gradients, strict=True):
        if f"grad.{what}" not in arrays:
            assert what == "initial_state" and "initial_state" not in arrays
            continue
        expected = arrays[f"grad.{what}"]
        if what == "dt_bias":
            expected = expected.reshape(-1, dim)
        # "float32: max abs error <= 5e-4 * max|grad of that input| + 1e-6"
        within(gradient, expected, 5e-4 * np.max(np.abs(expected)) + 1e-6, 0.0, f"grad.{what}")


@pytest.mark.parametrize("name", _names())
@pytest.mark.parametrize("form", ["reference", "xla"])
def test_kda_reproduces_golden_case(name, form):
    _check(name, form, embed=True)


@pytest.mark.parametrize("name", [name for name in _names() if name.startswith("lb_T")])
def test_kda_with_bounded_decay_reproduces_golden_lengths(name):
    _check(name, "xla_bounded", embed=False)


@pytest.mark.parametrize(
    "name", [name for name in _names() if name.startswith("lb_") and "lb_T" not in name]
)
def test_kda_with_bounded_decay_reproduces_golden_extremes(name):
    _check(name, "xla_bounded", embed=True)


def test_golden_tolerance_of_gradients_is_the_one_checked():
    assert "5e-4 * max|grad of that input| + 1e-6" in _load("lb_T1")[2]["grad"]
