"""The TPU kernel of `kda_decode`, interpreted, against the float64 definition."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import interpreted, kda_decode
from pallas_kernels.traffic import count_traffic
from tests.kernels.decode_cases import assert_as_definition, decode, make_operands

IMPLEMENTATION = "mosaic_tpu"


@pytest.mark.parametrize(
    ("dtype", "num_tokens"), [pytest.param("bfloat16", 2, marks=pytest.mark.slow), ("float32", 1)]
)
def test_fused_decoding_is_right(dtype, num_tokens):
    with interpreted("tpu_poisoned"):
        assert_as_definition(IMPLEMENTATION, make_operands(num_tokens, dtype), dtype)


@pytest.mark.slow
def test_every_state_is_right():
    with interpreted("tpu"):
        assert_as_definition(IMPLEMENTATION, make_operands(3), "float32", every_state=True)


@pytest.mark.slow
def test_activated_tokens_and_unbounded_gates_are_right():
    with interpreted("tpu"):
        assert_as_definition(IMPLEMENTATION, make_operands(2), "float32", fused=False)
        assert_as_definition(IMPLEMENTATION, make_operands(1), "float32", lower_bound=None)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 2, 8])
@pytest.mark.parametrize("shape", [(1, 32, 128, 128), (2, 5, 256, 128), (1, 12, 128, 256)])
def test_all_sizes_are_right(dtype, num_tokens, shape):
    rows, heads, key_dim, value_dim = shape
    operands = make_operands(
        num_tokens, dtype, rows=rows, heads=heads, key_dim=key_dim, value_dim=value_dim
    )
    with interpreted("tpu"):
        assert_as_definition(IMPLEMENTATION, operands, dtype)


@pytest.mark.slow
def test_two_cores_do_not_race():
    with interpreted("tpu_races"):
        operands = make_operands(2, "bfloat16", heads=32)
        assert_as_definition(IMPLEMENTATION, operands, "bfloat16")


@pytest.mark.parametrize("every_state", [False, True])
def test_traffic_is_the_least_and_as_estimated(every_state):
    operands = make_operands(2, "bfloat16", heads=32)
    with interpreted("tpu"):
        run = functools.partial(decode, IMPLEMENTATION, every_state=every_state)
        (call,) = count_traffic(run, operands)
        results = jax.eval_shape(run, operands)
    moved = jax.tree.leaves((operands, results))
    assert call.bytes == sum(x.size * x.dtype.itemsize for x in moved)
    assert call.cost_estimate.bytes_accessed == call.bytes


def test_gradient_is_refused_with_a_way_out():
    operands = make_operands(1)

    def loss(state):
        return jnp.sum(decode(IMPLEMENTATION, operands | {"state": state})[0])

    with interpreted("tpu"), pytest.raises(NotImplementedError, match="no gradient; use 'xla'"):
        jax.grad(loss)(operands["state"])


def test_head_sizes_that_do_not_fit_are_named():
    token = jnp.zeros((1, 1, 2, 64))
    arguments = (token, token, token, token, token[..., 0], jnp.zeros((1, 2, 64, 64)))
    with (
        interpreted("tpu"),
        pytest.raises(NotImplementedError, match="q has head size 64; the kernel takes 128 and"),
    ):
        kda_decode(*arguments, implementation=IMPLEMENTATION)
