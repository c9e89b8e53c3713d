"""Values and all gradients of a kernel, interpreted, against the float64 definition."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import interpreted
from tests.kernels.errors import assert_within


def values_and_gradients(function, operands, cotangents):
    """Return the outputs of function(*operands) and the gradients of the operands, as lists."""

    @jax.jit
    def run(operands, cotangents):
        outputs, transpose = jax.vjp(lambda *arrays: tuple(function(*arrays)), *operands)
        cotangents = tuple(c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True))
        return *outputs, *transpose(cotangents)

    return jax.tree.leaves(run(operands, cotangents))


def assert_kernel_as_definition(mode, function, operands, cotangents, *, spoil=None):
    """Assert that the kernel of a mode of `interpreted` agrees with the definition.

    Args:
        mode: "tpu", "gpu_races", ...
        function: function(implementation, *operands) -> outputs, all differentiable.
        operands: arrays; the definition gets their values in float64.
        cotangents: one per output.
        spoil: (operands, cotangents) -> the same with NaN in what must not be read.

    Returns:
        Outputs and gradients of the kernel, in one list.
    """
    kernel = "mosaic_" + mode.split("_")[0]
    given = (operands, cotangents) if spoil is None else spoil(operands, cotangents)
    with interpreted(mode):
        actual = values_and_gradients(lambda *arrays: function(kernel, *arrays), *given)
    with jax.enable_x64(True):
        exact = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x, np.float64)), (operands, cotangents)
        )
        expected = values_and_gradients(lambda *arrays: function("reference", *arrays), *exact)
    for n, (one, two) in enumerate(zip(actual, expected, strict=True)):
        # Results in float32 are as exact where the rows they come from are bfloat16.
        assert_within(one, two, str(one.dtype), name=f"result {n} of {len(expected)}")
    return actual
