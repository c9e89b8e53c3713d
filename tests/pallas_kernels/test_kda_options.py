"""Options of `kda` that take over what callers can do before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KDAGate, kda, kda_gate
from pallas_kernels.kda import l2_normalize
from tests.pallas_kernels.compare import assert_matches_definition, normal

B, T, H, K, V = 2, 19, 2, 8, 5


def _raw(length=T):
    shapes = ((H, K), (H, K), (H, V), (H, K), (H,))
    tokens = [normal(n, B, length, *shape) for n, shape in enumerate(shapes)]
    return (*tokens, normal(5, H), normal(6, H, K))


def _fused(implementation, q, k, v, logits, beta, A_log, dt_bias, *, lower_bound=-5.0, **options):
    gate = KDAGate(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    return kda(
        q, k, v, logits, beta, gate=gate, beta_logits=True, normalize_qk=True,
        implementation=implementation, **options,
    )  # fmt: skip


def _unfused(implementation, q, k, v, logits, beta, A_log, dt_bias, *, lower_bound=-5.0, **options):
    return kda(
        l2_normalize(q), l2_normalize(k), v,
        kda_gate(logits, A_log, dt_bias, lower_bound=lower_bound),
        jax.nn.sigmoid(beta.astype(jnp.float32)),
        log_decay_min=lower_bound, implementation=implementation, **options,
    )  # fmt: skip


@pytest.mark.parametrize("lower_bound", [-5.0, pytest.param(None, marks=pytest.mark.slow)])
def test_fused_options_match_definition(lower_bound):
    def op(implementation, *operands):
        return _fused(implementation, *operands, lower_bound=lower_bound)

    assert_matches_definition(op, _raw())


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_fused_options_equal_unfused_bit_for_bit(dtype):
    operands = [jnp.asarray(x, dtype) for x in _raw()[:5]]
    operands += [jnp.asarray(x, jnp.float32) for x in _raw()[5:]]

    def results(function):
        def loss(operands):
            output, state = function("xla", *operands)
            return jnp.sum(output.astype(jnp.float32) ** 2) + jnp.sum(state), (output, state)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(operands)

    for one, two in zip(
        jax.tree.leaves(results(_fused)), jax.tree.leaves(results(_unfused)), strict=True
    ):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_absent_tokens_of_fused_options_may_hold_nan():
    ids = np.repeat([[1, 0, 2]], B, axis=0).repeat([5, 3, 11], axis=1)
    clean = [jnp.asarray(x, jnp.float32) for x in _raw()]
    flags = [(ids == 0).reshape(B, T, *(1,) * (x.ndim - 2)) for x in clean[:5]]
    poisoned = [jnp.where(at, jnp.nan, x) for at, x in zip(flags, clean, strict=False)]

    @jax.jit
    def gradients(operands):
        return jax.grad(lambda x: jnp.sum(_fused("xla", *x, segment_ids=jnp.asarray(ids))[0] ** 2))(
            operands
        )

    for one, two in zip(gradients(poisoned + clean[5:]), gradients(clean), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"log_decay_min": -5.0}, ValueError, "log_decay_min=-5.0 is given beside a gate"),
        ({"gate": -5.0}, TypeError, "gate is a float; give a KDAGate"),
        ({"state_positions": jnp.zeros((B, 2))}, TypeError, "state_positions has dtype float32"),
        ({"state_positions": jnp.zeros((B + 1, 2), int)}, ValueError, r"expected \(2, 2\)"),
        ({"state_positions": np.array([[5, 4]] * B)}, ValueError, "positions decrease along a row"),
        (
            {"state_positions": np.array([[5]] * B), "segment_ids": jnp.ones((B, T), int)},
            ValueError,
            "state_positions beside segment_ids needs num_segments",
        ),
        ({"context_chunks": "all"}, ValueError, "context_chunks='all' must be a number"),
        ({"context_chunks": 1.5}, TypeError, "context_chunks=1.5 is a float; give an int"),
        ({"context_chunks": True}, TypeError, "context_chunks=True is a bool; give an int"),
        ({"num_segments": 1.0}, TypeError, "num_segments=1.0 is a float; give an int"),
        ({"scale": float("nan")}, ValueError, "scale=nan must be finite"),
        ({"state_positions": np.array([[-1, 4]] * B)}, ValueError, "state_positions hold -1"),
        ({"state_positions": np.array([[0, T + 1]] * B)}, ValueError, "state_positions hold"),
        ({"context_chunks": 2, "num_segments": 1}, ValueError, "leave out num_segments"),
    ],
)
def test_bad_options_are_named(change, error, message):
    *tokens, A_log, dt_bias = (jnp.asarray(x, jnp.float32) for x in _raw())
    options = {"gate": KDAGate(A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0)} | change
    with pytest.raises(error, match=message):
        kda(*tokens, **options)


def test_traced_scale_and_bound_are_named():
    *tokens, A_log, dt_bias = (jnp.asarray(x, jnp.float32) for x in _raw())
    with pytest.raises(TypeError, match="kda: scale is traced"):
        jax.jit(lambda scale: kda(*tokens, scale=scale))(1.0)

    def with_bound(bound):
        return kda(*tokens, gate=KDAGate(A_log=A_log, dt_bias=dt_bias, lower_bound=bound))

    with pytest.raises(TypeError, match="kda: lower_bound is traced"):
        jax.jit(with_bound)(-5.0)


def test_gate_that_does_not_fit_is_named():
    *tokens, A_log, dt_bias = (jnp.asarray(x, jnp.float32) for x in _raw())
    gate = KDAGate(A_log=A_log[:1], dt_bias=dt_bias, lower_bound=None)
    with pytest.raises(ValueError, match=r"kda: A_log has shape \(1,\); expected \(2,\)"):
        kda(*tokens, gate=gate)
