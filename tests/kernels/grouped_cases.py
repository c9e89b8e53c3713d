"""Kernels of grouped products against the definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import MXFP4, MXFP8, SituGLU, grouped_glu, grouped_matmul
from tests.kernels.errors import assert_within
from tests.pallas_kernels.compare import normal, values_and_gradients

ACTIVATION = SituGLU(4.0, 25.0)


def product(sizes):
    """op(implementation, x, weights) of `grouped_matmul`."""
    sizes = np.array(sizes, np.int32)
    return lambda implementation, *operands: grouped_matmul(
        *operands, sizes, implementation=implementation
    )


def gated(sizes):
    """op(implementation, x, gate, up) of `grouped_glu`."""
    sizes = np.array(sizes, np.int32)
    return lambda implementation, *operands: grouped_glu(
        *operands, sizes, activation=ACTIVATION, implementation=implementation
    )


def matrices(seed, sizes, width, columns, dtype="float32"):
    """One matrix per group, of products of about unit size."""
    return jnp.asarray(normal(seed, len(sizes), width, columns) * width**-0.5, dtype)


def assert_as_definition(op, rows, sizes, operands, implementation, dtype="float32"):
    """Compare the output and the gradients of all arrays among rows and matrices.

    Rows of x and of the cotangent that belong to no group are NaN for the kernel.

    Args:
        op: `product(sizes)` or `gated(sizes)`.
        rows: array [M, K], or `MXFP8`.
        sizes: of the groups.
        operands: matrices, arrays or `MXFP4`.
        implementation: to compare.
        dtype: of the arrays.
    """
    total = sum(sizes)
    num_rows, columns = rows.shape[0], operands[0].shape[2]
    is_past = np.arange(num_rows)[:, None] >= total
    poison = lambda a: jnp.where(is_past, jnp.nan, a)  # noqa: E731
    cotangent = jnp.asarray(normal(100, num_rows, columns), dtype)
    is_constant = [isinstance(operand, (MXFP4, MXFP8)) for operand in (rows, *operands)]

    def on_arrays(implementation, constants):
        def run(*arrays):
            arrays, held = iter(arrays), iter(constants)
            return op(implementation, *(next(held if c else arrays) for c in is_constant))

        return run

    split = lambda every, constant: [  # noqa: E731
        operand for operand, c in zip(every, is_constant, strict=True) if c == constant
    ]
    poisoned = (rows if is_constant[0] else poison(jnp.asarray(rows, dtype)), *operands)
    (output,), gradients = values_and_gradients(
        on_arrays(implementation, split(poisoned, True)),
        split(poisoned, False),
        [poison(cotangent)],
    )
    with jax.enable_x64(True):
        exact = lambda a: jnp.asarray(np.asarray(a, np.float64))  # noqa: E731
        every = [
            exact(o.dequantize(jnp.float32)) if c else exact(jnp.asarray(o, dtype))
            for o, c in zip((rows, *operands), is_constant, strict=True)
        ]
        (exact_output,), exact_gradients = values_and_gradients(
            lambda *arrays: op("reference", *arrays), every, [exact(cotangent)]
        )
    exact_gradients = split(exact_gradients, False)
    assert output.dtype == dtype and not np.any(output[total:])
    assert_within(output, exact_output, dtype, "output")
    names = split(["x", "first weights", "second weights"][: len(every)], False)
    for name, actual, expected in zip(names, gradients, exact_gradients, strict=True):
        assert_within(actual, expected, dtype, f"gradient of {name}")
    if not is_constant[0]:
        assert not np.any(gradients[0][total:])
