"""One step: accumulation, skipping, balancing, learning."""

import dataclasses

import jax
import numpy as np
import pytest

from k3jax.data.loader import Loader
from k3jax.errors import UserError
from k3jax.train.config import BalancingConfig, OptimizerConfig
from k3jax.train.data import read_data
from k3jax.train.state import ModelParts, from_tree, to_tree
from k3jax.train.step import make_evaluation_step, make_train_step
from tests.tolerances import assert_close
from tests.train.conftest import micro_config, micro_model


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """(config, parts, compiled step, optimizer, batches)."""
    config = micro_config(tmp_path_factory.mktemp("step"))
    config = dataclasses.replace(
        config, steps=40, optimizer=OptimizerConfig(peak_lr=1e-2, warmup_steps=5)
    )
    parts = ModelParts(micro_model())
    step, optimizer = make_train_step(parts, config)
    loader = batches_of(config, 1)
    return config, parts, jax.jit(step), optimizer, [next(loader) for _ in range(30)]


def batches_of(config, micro_batches):
    data = read_data(config, micro_model())
    return Loader(data.mixture, batch=config.batch, micro_batches=micro_batches)


def test_loss_decreases_and_biases_move(setting):
    _, parts, step, optimizer, batches = setting
    state = parts.fresh_state(optimizer, 0)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert abs(losses[0] - np.log(512)) < 0.2
    assert np.mean(losses[-5:]) < losses[0] - 1.5
    assert int(state.step) == 30
    (bias,) = state.rest.values()
    assert np.abs(bias).max() > 0
    assert abs(bias.sum()) < 1e-5
    assert float(metrics["router_bias_max"]) == float(bias.max())


def test_micro_batches_equal_one_batch(setting):
    config, parts, step, optimizer, _ = setting
    parted, _ = make_train_step(parts, dataclasses.replace(config, micro_batches=2))
    batch = next(batches_of(config, 1))
    in_parts = next(batches_of(config, 2))  # the same rows; pictures in a block for each part
    for rows in (batch, in_parts):
        rows["segment_ids"][0, 5:] = 0  # parts with unequal numbers of targets
    state = parts.fresh_state(optimizer, 0)
    whole, expected = step(state, batch)
    added, metrics = jax.jit(parted)(state, in_parts)
    assert int(metrics["targets"]) == int(expected["targets"])
    assert_close(metrics["loss"], expected["loss"])
    assert_close(metrics["grad_norm"], expected["grad_norm"], gradient=True)
    for name, bias in whole.rest.items():  # counts are integers: exactly equal
        np.testing.assert_array_equal(added.rest[name], bias, err_msg=name)
    found, wanted = (to_tree(s)["optimizer"]["1"]["mu"]["language"] for s in (added, whole))
    jax.tree.map(lambda a, b: assert_close(a, b, gradient=True), found, wanted)


def test_an_update_that_is_not_finite_is_skipped(setting):
    config, parts, _, _, batches = setting
    infinite = dataclasses.replace(config, optimizer=OptimizerConfig(peak_lr=3e38))
    step, optimizer = make_train_step(parts, infinite)
    state = parts.fresh_state(optimizer, 0)
    state = dataclasses.replace(state, step=state.step + infinite.steps // 2)
    after, metrics = jax.jit(step)(state, batches[0])
    assert not metrics["finite"] and int(after.skipped) == 1
    for name, value in state.params.items():
        np.testing.assert_array_equal(after.params[name], value, err_msg=name)


def test_step_that_is_not_finite_changes_only_the_counters(setting):
    _, parts, step, optimizer, batches = setting
    state = parts.fresh_state(optimizer, 0)
    bad = batches[0]["tokens"].copy()
    bad[0, 3] = 100_000  # outside the vocabulary: NaN logits
    after, metrics = step(state, batches[0] | {"tokens": bad})
    assert not bool(metrics["finite"])
    assert not metrics["finite_gradient"].all()
    assert [int(after.step), int(after.skipped), int(after.skipped_in_row)] == [1, 1, 1]
    for part in ("params", "rest", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, part), getattr(state, part))
    after, metrics = step(after, batches[0])
    assert bool(metrics["finite"])
    assert [int(after.step), int(after.skipped), int(after.skipped_in_row)] == [2, 1, 0]


def test_state_survives_the_tree_of_names(setting):
    _, parts, _, optimizer, _ = setting
    state = parts.fresh_state(optimizer, 0)
    again = from_tree(to_tree(state), parts.abstract_state(optimizer))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_evaluation_counts_bytes_only(setting):
    _, parts, _, optimizer, batches = setting
    state = parts.fresh_state(optimizer, 0)
    tokens, segment_ids = batches[0]["tokens"], batches[0]["segment_ids"]
    evaluate = make_evaluation_step(parts)

    @jax.jit
    def both(*arguments):
        return evaluate(*arguments), parts.join(*arguments[:2])(*arguments[2:])

    result, logits = both(state.params, state.rest, tokens, segment_ids)
    logits = np.asarray(logits, np.float64)
    nats, targets = 0.0, 0
    for row in range(len(tokens)):
        for t in range(1, tokens.shape[1]):
            same = segment_ids[row, t] == segment_ids[row, t - 1] > 0
            if same and tokens[row, t] < 256:
                scores = logits[row, t - 1]
                nats += np.log(np.exp(scores).sum()) - scores[tokens[row, t]]
                targets += 1
    assert int(result["targets"]) == targets
    assert_close(result["nats"], nats)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sign", "aux", "none"])
def test_other_balancing_rules(setting, rule):
    config, parts, step, optimizer, batches = setting
    balancing = BalancingConfig(rule=rule, sign_rate=0.25, aux_weight=0.5)
    other, _ = make_train_step(parts, dataclasses.replace(config, balancing=balancing))
    state = parts.fresh_state(optimizer, 0)
    found, metrics = jax.jit(other)(state, batches[0])
    expected, usual = step(state, batches[0])
    assert_close(metrics["loss"], usual["loss"])  # without the auxiliary loss
    (bias,) = found.rest.values()
    assert set(np.abs(np.asarray(bias)).tolist()) <= ({0.0, 0.25} if rule == "sign" else {0.0})
    assert np.any(bias != 0) == (rule == "sign")
    same = np.array_equal(
        *(next(v for n, v in s.params.items() if n.endswith("router")) for s in (found, expected))
    )
    assert same == (rule != "aux")  # only the auxiliary loss reaches the weights
    assert ("auxiliary_loss" in metrics) == (rule == "aux")
    if rule == "aux":
        assert 0.9 < float(metrics["auxiliary_loss"]) < 2  # one layer


def test_rates_of_balancing_rules_are_checked():
    with pytest.raises(UserError, match=r"balancing.sign_rate=0.0 must be .* above 0"):
        BalancingConfig(sign_rate=0.0)
