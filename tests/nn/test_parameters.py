"""Names, casts and start values of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import k3jax
from k3jax.config import K3Config
from k3jax.model import abstract_model
from k3jax.nn.initializers import LogDecay, Normal, StepBias, Uniform
from k3jax.nn.parameters import RouterBias, cast_parameters, named_variables
from tests.small_configs import five_layers, previous_family


@pytest.fixture(scope="module")
def model():
    return k3jax.init(K3Config.tiny(), jax.random.key(0))


@pytest.mark.parametrize("cfg", [five_layers(), previous_family(), K3Config.kimi_k3()])
def test_names_cover_every_array_once(cfg):
    model = abstract_model(cfg)
    named = named_variables(model)
    assert len(named) == len(jax.tree.leaves(model))
    variables = jax.tree.leaves(model, is_leaf=lambda v: isinstance(v, nnx.Variable))
    assert {id(v) for v in named.values()} == {id(v) for v in variables}
    assert not any(name.endswith(".value") for name in named)
    if cfg.model_type == "kimi_k3":
        assert "language.stack.segments.0.layers.0.attention.q_proj" in named
    trained, state = nnx.split(model, nnx.Param, ...)[1:]
    assert len(jax.tree.leaves(trained)) + len(jax.tree.leaves(state)) == len(named)
    assert all(isinstance(v, nnx.Param | RouterBias) for v in variables)


def test_dimensions_are_named_for_every_array():
    for name, variable in named_variables(abstract_model(five_layers())).items():
        if isinstance(variable, nnx.Param):
            dims = variable.get_metadata()["dims"]
            stacked = 1 if ".segments.1." in name else 0
            assert len(dims) + stacked == variable.ndim, name


def test_cast_keeps_what_the_release_stores_in_float32(model):
    kept = ("A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm", "router_bias")
    narrow = cast_parameters(model, jnp.bfloat16)
    for (name, before), after in zip(
        named_variables(model).items(), named_variables(narrow).values(), strict=True
    ):
        if name.rsplit(".", 1)[-1] in kept:
            np.testing.assert_array_equal(before[...], after[...], err_msg=name)
            assert after.dtype == jnp.float32, name
        else:
            assert after.dtype == jnp.bfloat16, name
        assert type(after) is type(before)
        assert after.get_metadata() == before.get_metadata()


def test_fresh_parameters_follow_their_distributions(model):
    draws = []
    for name, variable in named_variables(model).items():
        last, values = name.rsplit(".", 1)[-1], np.asarray(variable[...])
        assert values.dtype == np.float32
        if last in ("A_log", "router_bias", "proj"):  # bounded gate; pseudo-queries
            assert not values.any(), name
        elif last in ("weight", "norm", "o_norm"):
            assert (values == 1).all(), name
        elif last.endswith("_conv"):
            assert np.abs(values).max() <= 0.5, name  # 4 taps
            assert values.std() == pytest.approx(0.5 / 3**0.5, rel=0.1), name
        elif last == "dt_bias":
            step = np.log1p(np.exp(values))
            assert step.min() >= 0.99e-3, name
            assert step.max() <= 1.01e-1, name
        else:
            assert values.std() == pytest.approx(0.02, rel=0.15), name
            assert abs(values.mean()) < 0.02 * 5 / values.size**0.5, name
            draws.append(values.reshape(-1))
    # No two parameters (and no two repeats of a scanned layer) share their draws.
    starts = np.stack([d[:16] for d in draws])
    assert len(np.unique(starts[:, 0])) == len(draws)
    scanned = model.language.stack.segments[1].layers[0].attention.q_proj[...]
    assert not np.array_equal(scanned[0], scanned[1])


def test_same_key_gives_the_same_model(model):
    again = k3jax.init(K3Config.tiny(), jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, model, again)
    other = k3jax.init(K3Config.tiny(), jax.random.key(1))
    assert not np.array_equal(model.language.head[...], other.language.head[...])


def test_initialisers_of_a_large_draw():
    z = jax.random.normal(jax.random.key(2), (200_000,))
    assert float(Normal(0.02)(z).std()) == pytest.approx(0.02, rel=0.01)
    uniform = Uniform(0.5)(z)
    assert float(jnp.abs(uniform).max()) <= 0.5
    assert float(uniform.mean()) == pytest.approx(0, abs=0.003)
    np.testing.assert_allclose(np.quantile(uniform, [0.1, 0.5, 0.9]), [-0.4, 0, 0.4], atol=0.01)
    rate = np.exp(LogDecay(bounded=False)(z))  # U(1, 16)
    assert rate.min() >= 1
    assert rate.max() <= 16.0001
    np.testing.assert_allclose(np.quantile(rate, [0.1, 0.5, 0.9]), [2.5, 8.5, 14.5], atol=0.1)
    assert not LogDecay(bounded=True)(z).any()
    step = np.log10(np.log1p(np.exp(np.asarray(StepBias()(z), np.float64))))
    np.testing.assert_allclose(np.quantile(step, [0, 0.25, 0.5, 1]), [-3, -2.5, -2, -1], atol=0.02)


def test_unbounded_gate_starts_at_log_uniform_decay():
    model = k3jax.init(previous_family(), jax.random.key(0))
    decay = [v[...] for n, v in named_variables(model).items() if n.endswith("A_log")]
    decay = np.concatenate([np.asarray(d).reshape(-1) for d in decay])
    assert decay.min() > 0
    assert decay.max() < np.log(16.0001)
