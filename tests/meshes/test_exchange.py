"""Dispatch, redundant experts and collect against a dense product, values and gradients."""

import numpy as np
import pytest

from tests.meshes.expert_cases import (
    KINDS,
    arrays,
    dense_value_and_gradients,
    program,
    routing,
)
from tests.tolerances import assert_close

NAMES = ("x", "weights", "into", "back")


def check(num_ranks, num_experts, ids, **options):
    """Compare with the dense product; the group sizes of all ranks."""
    args, dy = arrays(ids, num_experts)
    y, gradients = dense_value_and_gradients(args, ids, dy)
    run = program(num_ranks, num_experts, **options)
    (actual, dropped, sizes), actual_gradients = run(args, ids, dy)
    assert_close(actual, y, name="y")
    for name, a, e in zip(NAMES, actual_gradients, gradients):
        assert_close(a, e, gradient=True, name=name)
    assert np.asarray(dropped).sum() == 0
    assert np.asarray(sizes).sum() == (ids < num_experts).sum()
    return np.asarray(sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks,num_experts", [(2, 6), (4, 8), (8, 24)])
@pytest.mark.parametrize("transport", ["gather", "padded"])
def test_balanced_equals_dense(transport, num_ranks, num_experts, kind):
    ids = routing(kind, num_ranks, num_experts)
    sizes = check(num_ranks, num_experts, ids, transport=transport)
    loads = sizes.sum(1)
    assert loads.max() - loads.min() <= 1
