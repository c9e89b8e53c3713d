"""The Hopper kernel of `kda_decode`, interpreted, against the float64 definition."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import interpreted, kda_decode
from tests.kernels.decode_cases import assert_as_definition, decode, make_operands

IMPLEMENTATION = "mosaic_gpu"


@pytest.mark.parametrize(
    ("dtype", "num_tokens"), [("float32", 1), pytest.param("bfloat16", 2, marks=pytest.mark.slow)]
)
def test_fused_decoding_is_right(dtype, num_tokens):
    operands = make_operands(num_tokens, dtype, rows=1, heads=2)
    with interpreted("gpu"):
        assert_as_definition(IMPLEMENTATION, operands, dtype)


@pytest.mark.slow
def test_every_state_is_right():
    with interpreted("gpu"):
        operands = make_operands(2, rows=1, heads=2)
        assert_as_definition(IMPLEMENTATION, operands, "float32", every_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"fused": False}, {"lower_bound": None}])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 64), (256, 192)])
def test_all_options_and_sizes_are_right(options, key_dim, value_dim):
    operands = make_operands(5, rows=2, heads=1, key_dim=key_dim, value_dim=value_dim)
    with interpreted("gpu"):
        assert_as_definition(IMPLEMENTATION, operands, "float32", **options)


@pytest.mark.slow
def test_threads_do_not_race():
    operands = make_operands(2, rows=1, heads=1)
    with interpreted("gpu_races"):
        assert_as_definition(IMPLEMENTATION, operands, "float32", every_state=True)


def test_gradient_is_refused_with_a_way_out():
    operands = make_operands(1)

    def loss(state):
        return jnp.sum(decode(IMPLEMENTATION, operands | {"state": state})[0])

    with interpreted("gpu"), pytest.raises(NotImplementedError, match="no gradient; use 'xla'"):
        jax.grad(loss)(operands["state"])


def test_head_sizes_that_do_not_fit_are_named():
    token = jnp.zeros((1, 1, 2, 64))
    arguments = (token, token, token, token, token[..., 0], jnp.zeros((1, 2, 64, 64)))
    with (
        interpreted("gpu"),
        pytest.raises(NotImplementedError, match="q has head size 64; the kernel takes 128 and"),
    ):
        kda_decode(*arguments, implementation=IMPLEMENTATION)
