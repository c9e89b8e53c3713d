"""Compare the forms of an op: values and all gradients against the float64 definition."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tests.tolerances import assert_close


def normal(seed: int, *shape: int) -> np.ndarray:
    """Return standard normal numbers in float64, always the same for one seed."""
    return np.random.default_rng(seed).normal(size=shape)


def values_and_gradients(function, operands, cotangents):
    """Return the outputs of function(*operands) as a list and the gradient of each operand."""

    @jax.jit
    def run(operands, cotangents):
        outputs, transpose = jax.vjp(lambda *arrays: jax.tree.leaves(function(*arrays)), *operands)
        cotangents = [c.astype(output.dtype) for c, output in zip(cotangents, outputs, strict=True)]
        return outputs, transpose(cotangents)

    return run(operands, cotangents)


def _cotangents(function, operands):
    outputs = jax.tree.leaves(jax.eval_shape(function, *operands))
    return [normal(100 + n, *output.shape) for n, output in enumerate(outputs)]


def assert_matches_definition(function, operands, dtype="float32"):
    """Assert that the xla form agrees with the definition evaluated in float64.

    Args:
        function: function(implementation, *operands) -> outputs, all differentiable.
        operands: numpy arrays; both forms get their values rounded to `dtype`.
        dtype: of the operands of the xla form; its name selects the tolerance.

    Returns:
        (outputs, gradients) of the xla form.
    """
    rounded = [jnp.asarray(operand, dtype) for operand in operands]
    fast = lambda *arrays: function("xla", *arrays)  # noqa: E731
    cotangents = [jnp.asarray(c, dtype) for c in _cotangents(fast, rounded)]
    outputs, gradients = values_and_gradients(fast, rounded, cotangents)
    with jax.enable_x64(True):
        exact_operands = [jnp.asarray(np.asarray(array, np.float64)) for array in rounded]
        exact_cotangents = [jnp.asarray(np.asarray(array, np.float64)) for array in cotangents]
        exact_outputs, exact_gradients = values_and_gradients(
            lambda *arrays: function("reference", *arrays), exact_operands, exact_cotangents
        )
        assert all(output.dtype == jnp.float64 for output in exact_outputs)
    for n, (actual, exact) in enumerate(zip(outputs, exact_outputs, strict=True)):
        assert_close(actual, exact, dtype, name=f"output {n}")
    for n, (actual, exact) in enumerate(zip(gradients, exact_gradients, strict=True)):
        assert actual.dtype == rounded[n].dtype
        assert_close(actual, exact, dtype, gradient=True, name=f"gradient {n}")
    return outputs, gradients


def assert_same_per_device(function, operands, specs, output_specs, one_device=None):
    """Assert that values and gradients on two devices equal those on one, types checked.

    Args:
        function: function(*operands) -> outputs, on arrays of one device.
        operands: numpy arrays, of which the float ones are differentiated.
        specs: `PartitionSpec` of each operand over the axis "data" of two devices.
        output_specs: the same for the list of outputs.
        one_device: the same result from whole operands; None is `function` itself.
    """
    operands = [jnp.asarray(o, jnp.float32 if o.dtype.kind == "f" else jnp.int32) for o in operands]
    is_float = [jnp.issubdtype(operand.dtype, jnp.floating) for operand in operands]

    def on_floats(whole):
        def run(*floats):
            floats = iter(floats)
            pairs = zip(operands, is_float, strict=True)
            return whole(*[next(floats) if real else operand for operand, real in pairs])

        return run

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(
        lambda *arrays: jax.tree.leaves(function(*arrays)),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=list(output_specs),
        check_vma=True,
    )
    floats = [operand for operand, real in zip(operands, is_float, strict=True) if real]
    whole = on_floats(one_device or function)
    cotangents = _cotangents(whole, floats)
    expected = values_and_gradients(whole, floats, cotangents)
    actual = values_and_gradients(on_floats(split), floats, cotangents)
    for n, (one, two) in enumerate(zip(expected[0], actual[0], strict=True)):
        assert_close(two, one, name=f"output {n}")
    for n, (one, two) in enumerate(zip(expected[1], actual[1], strict=True)):
        assert_close(two, one, gradient=True, name=f"gradient {n}")


DATA = PartitionSpec("data")
REPLICATED = PartitionSpec()
