"""The whole model on meshes: loss, every gradient, routes and statistics of one device.

Each case prints the smallest margin of a router and the largest error (`pytest -rP`).
"""

import jax
import numpy as np
import pytest

from tests.model.mesh_cases import (
    ALONE,
    LIGHT,
    TOGETHER,
    TOLERANCE,
    compiled,
    largest_errors,
    mesh_config,
    mesh_inputs,
    mesh_model,
    run_on_mesh,
)


@pytest.fixture(scope="module")
def one_device():
    """Model, inputs, and what one device makes of them."""
    cfg = mesh_config()
    model, inputs = mesh_model(cfg), mesh_inputs(cfg)
    case = LIGHT
    return model, inputs, compiled(recorded=True)(model, *inputs, case.parallel, case.remat)


def assert_equal_to_one_device(one_device, case):
    model, inputs, wanted = one_device
    (loss, (num_targets, losses, (statistics, routes))), gradients = wanted
    real = inputs[1] != 0
    margin = float(np.asarray(routes["margin"])[:, real].min())
    assert margin > 1e-4, "routes could differ by rounding: take another seed"

    ((found_loss, (found_targets, found_losses, found_routing)), found), placed = run_on_mesh(
        model, inputs, case
    )
    if "stage" in case.axes:
        found_statistics = found_routing
    else:
        found_statistics, found_routes = found_routing
        ids, found_ids = (
            np.sort(np.asarray(r["expert_ids"])[:, real], -1) for r in (routes, found_routes)
        )
        np.testing.assert_array_equal(found_ids, ids)
    for name in ("expert_counts", "histogram", "num_tokens"):
        np.testing.assert_array_equal(
            getattr(found_statistics, name), getattr(statistics, name), err_msg=name
        )
    assert int(found_targets) == int(num_targets)
    errors = largest_errors(found, gradients)
    worst = next(iter(errors))
    print(f"{case}: smallest margin {margin:.1e}, largest error {errors[worst]:.1e} in {worst}")
    assert abs(float(found_loss) - float(loss)) <= TOLERANCE * abs(float(loss))
    losses = np.asarray(losses)
    assert np.abs(np.asarray(found_losses) - losses).max() <= TOLERANCE * losses.max()
    assert errors[worst] <= TOLERANCE, {n: e for n, e in errors.items() if e > TOLERANCE}
    for gradient, parameter in zip(jax.tree.leaves(found), jax.tree.leaves(placed), strict=True):
        assert gradient.sharding.is_equivalent_to(parameter.sharding, gradient.ndim)


def test_loss_and_gradients_on_three_axes_equal_one_device(one_device):
    assert_equal_to_one_device(one_device, LIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_loss_and_gradients_on_one_axis_equal_one_device(one_device, case):
    assert_equal_to_one_device(one_device, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", TOGETHER, ids=str)
def test_loss_and_gradients_on_several_axes_equal_one_device(one_device, case):
    assert_equal_to_one_device(one_device, case)
