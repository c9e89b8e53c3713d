"""A few tokens from a state, with convolution, norms and gate fused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KDAConv, KDAGate, interpreted, kda, kda_decode, short_conv
from tests.pallas_kernels.compare import assert_matches_definition, normal
from tests.tolerances import assert_close

B, T, H, K, V, W = 3, 2, 2, 8, 5, 4


def _operands():
    """Raw tokens, gate parameters, convolution weights and tails, and a state."""
    shapes = ((H, K), (H, K), (H, V), (H, K), (H,))
    tokens = [normal(n, B, T, *shape) for n, shape in enumerate(shapes)]
    weights = [normal(10 + n, W, *shape) for n, shape in enumerate(shapes[:3])]
    tails = [normal(20 + n, B, W - 1, *shape) for n, shape in enumerate(shapes[:3])]
    return (*tokens, normal(5, H), normal(6, H, K), *weights, *tails, normal(9, B, H, K, V))


def _unpack(operands):
    tokens, (A_log, dt_bias), state = operands[:5], operands[5:7], operands[13]
    gate = KDAGate(A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0)
    return tokens, gate, KDAConv(tuple(operands[7:10]), tuple(operands[10:13])), state


def _decode(implementation, *operands, **options):
    tokens, gate, conv, state = _unpack(operands)
    return kda_decode(
        *tokens, state, gate=gate, conv=conv, beta_logits=True, normalize_qk=True,
        implementation=implementation, **options,
    )  # fmt: skip


@pytest.mark.parametrize("every_state", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fused_decoding_matches_definition(every_state):
    def op(implementation, *operands):
        return _decode(implementation, *operands, every_state=every_state)

    (output, state, *tails), _ = assert_matches_definition(op, _operands())
    steps = (T,) if every_state else ()
    assert output.shape == (B, T, H, V) and state.shape == (B, *steps, H, K, V)
    assert [x.shape for x in tails] == [(B, *steps, W - 1, H, n) for n in (K, K, V)]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_several_tokens_equal_the_layer_run_in_one_pass(dtype):
    operands = [jnp.asarray(x, dtype if n < 5 or n in (10, 11, 12) else "float32")
                for n, x in enumerate(_operands())]  # fmt: skip
    tokens, gate, conv, state = _unpack(operands)
    convolved = [
        short_conv(x, w, initial_state=tail)
        for x, w, tail in zip(tokens[:3], conv.weights, conv.tails, strict=True)
    ]
    expected, expected_state = kda(
        *(x for x, _ in convolved), *tokens[3:], gate=gate, beta_logits=True, normalize_qk=True,
        initial_state=state,
    )  # fmt: skip
    output, new_state, tails = jax.jit(lambda *a: _decode("xla", *a))(*operands)
    assert_close(output, expected, dtype)
    assert_close(new_state, expected_state)  # not rounded on the way, whatever the operands
    for tail, (_, expected_tail) in zip(tails, convolved, strict=True):
        np.testing.assert_array_equal(tail, expected_tail)


@pytest.mark.slow
def test_every_state_is_the_state_of_so_many_tokens():
    """What speculation needs: after one or two accepted tokens the rest has left no trace."""
    operands = [jnp.asarray(x, jnp.float32) for x in _operands()]
    _, states, tails = _decode("xla", *operands, every_state=True)
    for accepted in (1, T):
        some = [x[:, :accepted] for x in operands[:5]] + operands[5:]
        _, state, tail = _decode("xla", *some)
        assert_close(states[:, accepted - 1], state)
        for all_tails, one in zip(tails, tail, strict=True):
            np.testing.assert_array_equal(all_tails[:, accepted - 1], one)


def test_one_token_may_lack_its_dimension():
    operands = [jnp.asarray(x, jnp.float32) for x in _operands()]
    one = [x[:, :1] for x in operands[:5]] + operands[5:]
    flat = [x[:, 0] for x in operands[:5]] + operands[5:]
    for every_state in (False, True):
        output, state, tails = _decode("xla", *one, every_state=every_state)
        flat_output, flat_state, flat_tails = _decode("xla", *flat, every_state=every_state)
        np.testing.assert_array_equal(flat_output, output[:, 0])
        np.testing.assert_array_equal(flat_state.ravel(), state.ravel())
        assert flat_state.shape == (B, H, K, V)
        assert all(x.shape[:2] == (B, W - 1) for x in flat_tails)
        np.testing.assert_array_equal(flat_tails[2].ravel(), tails[2].ravel())


def _bad(change):
    tokens, gate, conv, state = _unpack([jnp.asarray(x, jnp.float32) for x in _operands()])
    return tokens, {"state": state, "gate": gate, "conv": conv} | change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"conv": 4}, TypeError, "conv is a int; give a KDAConv or None"),
        ({"gate": "softplus"}, TypeError, "gate is a str; give a KDAGate or None"),
        (
            {"conv": KDAConv((jnp.zeros((1, H, K)),) * 3, (jnp.zeros((B, 0, H, K)),) * 3)},
            ValueError,
            "need at least 2 taps",
        ),
        (
            {"conv": KDAConv((jnp.zeros((W, H, K)),) * 3, (jnp.zeros((B, W - 1, H, K)),) * 3)},
            ValueError,
            r"conv.weights of v has shape \(4, 2, 8\); expected \(4, 2, 5\)",
        ),
        ({"implementation": "triton"}, ValueError, "'triton' is unknown"),
    ],
)
def test_bad_decode_options_are_named(change, error, message):
    tokens, options = _bad(change)
    with pytest.raises(error, match=message):
        kda_decode(*tokens, **options)


def test_no_rows_give_no_output_and_need_no_kernel():
    tokens = [jnp.zeros((0, *shape)) for shape in ((H, 128),) * 4 + ((H,),)]
    state = jnp.zeros((0, H, 128, 128))
    output, after = kda_decode(*tokens, state)
    assert output.shape == (0, H, 128) and after.shape == state.shape
    for platform in ("tpu", "gpu"):
        with interpreted(platform), pytest.raises(NotImplementedError, match="empty; use 'xla'"):
            kda_decode(*tokens, state, implementation=f"mosaic_{platform}")
