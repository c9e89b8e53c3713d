"""Quantile Balancing: the rank rule, its histogram, and statistics that add up exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshes
from k3jax import ops
from k3jax.model import K3, abstract_model
from k3jax.nn.balancing import (
    NUM_BINS,
    RouterStatistics,
    auxiliary_loss,
    balance_routers,
    count_step,
    exact_bias,
    histogram_bias,
    histogram_range,
    sign_bias,
    sum_scores,
)
from k3jax.nn.parameters import RouterBias, named_variables
from tests.small_configs import five_layers, quick_jit, random_tokens, randomized

# Two experts, one chosen.
SCORES = np.array([[0.9, 0.1], [0.65025, 0.34975], [0.64975, 0.35025], [0.55, 0.45]], np.float32)


@functools.partial(jax.jit, static_argnames="k")
def count(scores, bias, real, *, k):
    """Counts and histogram of scores [B, T, E]."""
    ids, cutoff = ops.select_experts(scores, bias, experts_per_token=k)
    return count_step(scores, ids, cutoff, bias, real)


def step(scores, bias, *, k):
    """Counts, and the new bias by histogram, of scores [N, E]."""
    counts, histogram = count(jnp.asarray(scores)[None], bias, None, k=k)
    return counts, histogram_bias(histogram, jnp.int32(len(scores)), bias, k)


def test_example_of_two_experts():
    bias = jnp.zeros(2)
    np.testing.assert_allclose(exact_bias(SCORES, bias, 1), [-0.14975, 0.14975], atol=1e-6)
    counts, new = step(SCORES, bias, k=1)
    assert counts.tolist() == [4, 0]
    np.testing.assert_allclose(new, [-0.14975, 0.14975], atol=0.002)


def test_micro_batches_add_up_to_the_batch():
    bias = jnp.array([0.05, -0.05])
    whole = count(jnp.asarray(SCORES)[None], bias, None, k=1)
    parts = [count(jnp.asarray(SCORES[i : i + 1])[None], bias, None, k=1) for i in range(4)]
    for total, part in zip(whole, zip(*parts)):
        np.testing.assert_array_equal(sum(part), total)
        assert total.dtype == jnp.int32


@pytest.mark.parametrize(
    "shape", [{"data": 2}, {"data": 4}, {"fsdp": 2, "data": 4}, {"context": 4}]
)
def test_devices_add_up_to_the_batch(shape):
    random = np.random.default_rng(0)
    scores = jnp.asarray(random.random((8, 4, 6)), jnp.float32)
    bias = jnp.asarray(random.normal(0, 0.1, 6), jnp.float32)
    real = jnp.asarray(random.random((8, 4)) < 0.7)
    expected = count(scores, bias, real, k=2)
    mesh = meshes.build_mesh(
        meshes.MeshShape(**shape), jax.devices()[: int(np.prod(list(shape.values())))]
    )
    spec = P(None, "context") if "context" in shape else P(("data", "fsdp"))
    with jax.set_mesh(mesh):
        put = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, spec))
        whole = jax.device_put(bias, jax.NamedSharding(mesh, P()))
        found = count(put(scores), whole, put(real), k=2)
        new = histogram_bias(found[1], real.sum(), whole, 2)
    for total, wanted in zip(found, expected):
        np.testing.assert_array_equal(total, wanted)
    np.testing.assert_array_equal(new, histogram_bias(expected[1], real.sum(), bias, 2))


def test_padding_is_not_counted():
    bias = jnp.zeros(2)
    padded = jnp.concatenate([jnp.asarray(SCORES), jnp.full((3, 2), jnp.nan)])[None]
    real = jnp.arange(7)[None] < 4
    for found, expected in zip(
        count(padded, bias, real, k=1), count(jnp.asarray(SCORES)[None], bias, None, k=1)
    ):
        np.testing.assert_array_equal(found, expected)


def test_without_tokens_the_bias_stays():
    bias = jnp.array([[0.3, -0.1, -0.2]])
    empty = jnp.zeros((1, 3, NUM_BINS), jnp.int32)
    np.testing.assert_array_equal(histogram_bias(empty, jnp.int32(0), bias, 1), bias)


def skewed(seed, tokens=1024, experts=16):
    """Sigmoid scores of a router that prefers some experts strongly."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 1, (tokens, experts)) + random.normal(0, 1.5, experts)
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def definition(scores, bias, k):
    """The rank rule in float64: -b is the (q+1)-th largest of s - alpha; centred."""
    scores, bias = np.asarray(scores, np.float64), np.asarray(bias, np.float64)
    alpha = -np.sort(-(scores + bias), axis=1)[:, k]
    ranked = -np.sort(-(scores - alpha[:, None]), axis=0)
    new = -ranked[len(scores) * k // scores.shape[1]]
    return new - new.mean()


@pytest.mark.parametrize("seed", range(5))
def test_histogram_stays_within_a_bin_of_the_rank_rule(seed):
    scores, bias = skewed(seed), jnp.zeros(16)
    for _ in range(3):
        _, width = histogram_range(bias)
        expected = definition(scores, bias, 3)
        np.testing.assert_allclose(exact_bias(scores, bias, 3), expected, atol=1e-6)
        _, new = step(scores, bias, k=3)
        # One bin for the estimate of each expert, and as much for their mean.
        assert np.abs(new - expected).max() <= 2 * width
        assert new.dtype == jnp.float32
        assert abs(float(new.mean())) < 1e-6
        bias = new


def test_load_becomes_even_within_a_few_steps():
    bias, overload = jnp.zeros(16), []
    mean = 1024 * 3 / 16
    for seed in range(5):
        random = np.random.default_rng(100 + seed)  # new tokens, the same preferences
        preferences = np.random.default_rng(7).normal(0, 1.5, 16)
        logits = random.normal(0, 1, (1024, 16)) + preferences
        counts, bias = step((1 / (1 + np.exp(-logits))).astype(np.float32), bias, k=3)
        overload.append(float(counts.max()) / mean - 1)
    assert overload[0] > 1.5
    assert overload[-1] < 0.25
    statistics = RouterStatistics(counts[None], jnp.zeros((1, 16, NUM_BINS), jnp.int32), 1024)
    np.testing.assert_allclose(statistics.overload(), overload[-1], rtol=1e-5)


def test_sign_rule_moves_every_bias_by_its_rate():
    counts = jnp.array([[5, 1, 3], [0, 0, 0]])
    bias = jnp.array([[0.25, 0.0, -0.5], [1.0, 2.0, 3.0]])
    expected = [[0.125, 0.125, -0.5], [1.0, 2.0, 3.0]]
    np.testing.assert_array_equal(sign_bias(counts, bias, 0.125), expected)


def test_sign_rule_levels_the_load_slowly():
    """Of the two rules Quantile Balancing is there after a few steps, the other one after many."""
    bias, overload = jnp.zeros(16), []
    preferences = np.random.default_rng(7).normal(0, 1.5, 16)
    for seed in range(60):
        logits = np.random.default_rng(seed).normal(0, 1, (1024, 16)) + preferences
        scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
        counts, _ = count(jnp.asarray(scores)[None], bias, None, k=3)
        bias = sign_bias(counts, bias, 0.02)
        overload.append(float(counts.max()) / (1024 * 3 / 16) - 1)
    assert overload[0] > 1.5 and overload[4] > 0.5
    assert np.mean(overload[-5:]) < 0.4


def test_auxiliary_loss_and_its_gradient_are_the_formula():
    random = np.random.default_rng(2)
    scores = random.uniform(0.1, 1, (3, 5, 4)).astype(np.float32)
    real = random.random((3, 5)) < 0.7
    chosen = np.argsort(-scores, axis=-1)[..., :2]
    rows = np.array([((chosen == e).any(-1) & real).sum() for e in range(4)])
    tokens = real.sum()
    scores[~real] = np.nan  # of padding nothing may remain

    def loss(scores):
        sums = sum_scores(scores, jnp.asarray(real))
        counts = jnp.asarray(rows[None], jnp.int32)
        statistics = RouterStatistics(counts, None, jnp.int32(tokens), score_sums=sums[None])
        return auxiliary_loss(statistics, 2)

    load = rows / (2 * tokens / 4)
    kept = np.where(real[..., None], scores, 0.0).astype(np.float64)
    sums = np.where(real, kept.sum(-1), 1.0)[..., None]
    expected = (load * kept / sums / tokens).sum()
    value, gradient = jax.value_and_grad(loss)(jnp.asarray(scores))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    slope = (load - (load * kept).sum(-1, keepdims=True) / sums) / sums / tokens
    np.testing.assert_allclose(gradient, np.where(real[..., None], slope, 0), atol=1e-7)


def test_auxiliary_loss_of_an_even_load_is_one_per_layer():
    counts, sums = jnp.full((3, 4), 6), jnp.full((3, 4), 3.0)
    statistics = RouterStatistics(counts, None, jnp.int32(12), score_sums=sums)
    assert float(auxiliary_loss(statistics, 2)) == 3.0


def test_ranks_beyond_float32_and_int32_products_are_exact():
    """Counts of a step of 2^28 tokens: tokens * k does not fit int32, ranks not float32."""
    tokens, k, experts = 2**28, 16, 896
    histogram = np.zeros((experts, NUM_BINS), np.int32)
    rank = tokens * k // experts  # 4793490.28 rounded down
    histogram[:, 500], histogram[:, 700] = rank, tokens - rank
    histogram[0, 500] += 1  # the rank is inside bin 500 here, inside bin 700 elsewhere
    histogram[0, 700] -= 1
    new = histogram_bias(jnp.asarray(histogram), jnp.int32(tokens), jnp.zeros(experts), k)
    assert float(new[1] - new[0]) == pytest.approx(0.398, abs=0.003)


@pytest.fixture(scope="module")
def model():
    return randomized(five_layers())


def test_model_statistics_reach_the_bias_of_their_own_layer(model):
    tokens = random_tokens(model.cfg, 2, 12)
    ids = np.ones((2, 12), np.int32)
    ids[0, :5] = 0
    forward = quick_jit(functools.partial(K3.forward, statistics=True))
    _, _, statistics = forward(model, tokens, ids)
    assert statistics.expert_counts.shape == (4, 6)
    assert statistics.histogram.shape == (4, 6, NUM_BINS)
    balanced = balance_routers(model, statistics)
    before, after = named_variables(model), named_variables(balanced)
    found = {name for name in before if not np.array_equal(before[name][...], after[name][...])}
    names = [f"language.stack.segments.1.layers.{j}.feed_forward.router_bias" for j in range(2)]
    assert found == set(names)
    for position, name in enumerate(names):
        assert isinstance(after[name], RouterBias)
        for repeat in range(2):
            row = 2 * repeat + position  # depth runs through the unit first
            expected = histogram_bias(
                statistics.histogram[row], statistics.num_tokens, before[name][repeat], 2
            )
            np.testing.assert_allclose(after[name][repeat], expected, atol=1e-6)


@pytest.mark.parametrize("rule", ["sign", "aux", "none"])
def test_other_rules_move_the_bias_by_their_rate_or_not_at_all(model, rule):
    counts = jnp.asarray(np.random.default_rng(1).integers(0, 9, (4, 6)), jnp.int32)
    statistics = RouterStatistics(counts, jnp.zeros((4, 6, NUM_BINS), jnp.int32), jnp.int32(12))
    balanced = balance_routers(model, statistics, rule=rule, sign_rate=0.5)
    names = model.router_bias_rows()
    before, after = named_variables(model), named_variables(balanced)
    for name, rows in names.items():
        expected = before[name][...]
        if rule == "sign":
            expected = sign_bias(counts[rows], expected, 0.5)
        np.testing.assert_array_equal(after[name][...], expected)


def test_bias_gets_no_gradient_and_is_no_parameter():
    abstract = abstract_model(five_layers())
    kinds = {type(v).__name__ for n, v in named_variables(abstract).items() if "router_bias" in n}
    assert kinds == {"RouterBias"}
