"""One sort of packed keys orders like a stable argsort."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshes.sort import stable_order


@pytest.mark.parametrize("largest", [1, 6, 2**29])
@pytest.mark.parametrize("shape", [(1,), (37,), (3, 11)])
def test_stable_order_is_a_stable_argsort(shape, largest):
    """The largest bound leaves no room for positions: pairs are sorted."""
    values = np.random.default_rng(0).integers(0, min(largest, 6), shape, endpoint=True)
    order = stable_order(jnp.asarray(values, jnp.int32), largest)
    assert order.dtype == jnp.int32
    np.testing.assert_array_equal(order, np.argsort(values, axis=-1, kind="stable"))


def test_booleans_are_ordered():
    values = np.array([True, False, True, False, False])
    np.testing.assert_array_equal(stable_order(jnp.asarray(values), 1), [1, 3, 4, 0, 2])
