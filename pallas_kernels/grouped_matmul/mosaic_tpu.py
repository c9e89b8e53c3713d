"""Grouped products on TPU: one kernel for rows times matrices, one for the matrices' gradients.

Least traffic: a matrix is read once, whatever the number of its rows, and rows are read once per
block of output columns. Packed matrices are decoded in vector memory, once for all their rows.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.checks import align_varying
from pallas_kernels.device import current_device
from pallas_kernels.grouped_matmul.mosaic_tpu_matrices import multiply_groups
from pallas_kernels.grouped_matmul.mosaic_tpu_rows import RowProducts, multiply_rows
from pallas_kernels.mxfp4 import MXFP4
from pallas_kernels.mxfp8 import MXFP8

_LARGEST_WIDTH = 16384  # a tile of rows and a block of 128 columns must fit in vector memory

# Chips with 16 MB of vector memory. The kernels need 30 to 60 MB at the widths of the released
# model and ask the compiler for as much; v5p and tpu7x have 64 MB, v5e and v6e 128 MB.
_SMALL_CHIPS = ("tpu-v2", "tpu-v3", "v4")


def unsupported(x: jax.Array | MXFP8, *weights: jax.Array | MXFP4) -> str | None:
    """Why the kernels do not take these arguments, or None."""
    device = current_device().name
    if device in _SMALL_CHIPS:
        return f"device {device} has 16 MB of vector memory; TPUs from v5e on are supported"
    _, width, num_columns = weights[0].shape
    is_packed = isinstance(weights[0], MXFP4)
    if not isinstance(x, MXFP8) and x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x has dtype {x.dtype}; float32 and bfloat16 are supported"
    if not is_packed:
        for matrices in weights:
            if matrices.dtype != x.dtype:
                return f"weights have dtype {matrices.dtype} and x {x.dtype}; they must be equal"
    elif not isinstance(x, MXFP8) and x.dtype != jnp.bfloat16:
        return f"x has dtype {x.dtype}; with MXFP4 weights bfloat16 and MXFP8 are supported"
    if x.shape[0] == 0:
        return "x has no rows (M=0); use 'xla' for empty arrays"
    multiple = 256 if is_packed else 128
    if width % multiple or width > _LARGEST_WIDTH:
        return f"K={width} must be a multiple of {multiple} up to {_LARGEST_WIDTH}"
    if num_columns % 128 or num_columns > _LARGEST_WIDTH:
        return f"N={num_columns} must be a multiple of 128 up to {_LARGEST_WIDTH}"
    return None


def grouped_matmul(x, weights, group_sizes: jax.Array) -> jax.Array:
    """See `pallas_kernels.grouped_matmul`."""
    leaves, structure = jax.tree.flatten((x, weights, group_sizes))
    return _product(*jax.tree.unflatten(structure, align_varying(*leaves)))


def grouped_glu(x, gate, up, group_sizes: jax.Array, activation) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_glu`."""
    leaves, structure = jax.tree.flatten((x, gate, up, group_sizes))
    return _gated(activation, *jax.tree.unflatten(structure, align_varying(*leaves)))


def _plain(sums, extras):
    return sums


_FORWARD = RowProducts(name="grouped_matmul", operand_of=(0,), transposed=False, epilogue=_plain)
_BACKWARD = RowProducts(
    name="grouped_matmul_gradient", operand_of=(0,), transposed=True, epilogue=_plain
)
_BACKWARD_OF_TWO = RowProducts(
    name="grouped_glu_input_gradient",
    operand_of=(0, 1),
    transposed=True,
    epilogue=lambda sums, extras: [sums[0] + sums[1]],
)


@jax.custom_vjp
def _product(x, weights, group_sizes):
    return multiply_rows(_FORWARD, (x,), (weights,), (), group_sizes)[0]


def _product_forward(x, weights, group_sizes):
    return _product(x, weights, group_sizes), (x, weights, group_sizes)


def _product_backward(operands, d_output):
    x, weights, group_sizes = operands
    if isinstance(x, MXFP8):
        return None, None, None
    (d_x,) = multiply_rows(_BACKWARD, (d_output,), (weights,), (), group_sizes)
    return d_x, _gradient_of(weights, x, d_output, group_sizes), None


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation, x, gate, up, group_sizes):
    products = RowProducts(
        name="grouped_glu",
        operand_of=(0, 0),
        transposed=False,
        epilogue=lambda sums, extras: [activation(*sums)],
        transcendentals=_transcendentals(activation, 2),
    )
    return multiply_rows(products, (x,), (gate, up), (), group_sizes)[0]


def _gated_forward(activation, x, gate, up, group_sizes):
    return _gated(activation, x, gate, up, group_sizes), (x, gate, up, group_sizes)


def _gated_backward(activation, operands, d_output):
    """The products once more, with the gradients of both, then the three products with those."""
    x, gate, up, group_sizes = operands
    if isinstance(x, MXFP8):
        return None, None, None, None

    def gradients(a, b, d_hidden):
        _, transpose = jax.vjp(activation, a, b)
        return transpose(d_hidden.astype(a.dtype))

    products = RowProducts(
        name="grouped_glu_gradient",
        operand_of=(0, 0),
        transposed=False,
        epilogue=lambda sums, extras: gradients(*sums, *extras),
        num_outputs=2,
        transcendentals=_transcendentals(gradients, 3),
    )
    d_a, d_b = multiply_rows(products, (x,), (gate, up), (d_output,), group_sizes)
    (d_x,) = multiply_rows(_BACKWARD_OF_TWO, (d_a, d_b), (gate, up), (), group_sizes)
    d_gate = _gradient_of(gate, x, d_a, group_sizes)
    d_up = _gradient_of(up, x, d_b, group_sizes)
    return d_x, d_gate, d_up, None


_gated.defvjp(_gated_forward, _gated_backward)


def _gradient_of(weights, x, d_products, group_sizes):
    if isinstance(weights, MXFP4):
        return None
    return multiply_groups(x, d_products, group_sizes, weights.dtype)


def _transcendentals(function, num_operands: int) -> int:
    """Transcendental functions that an elementwise function evaluates for one element."""
    names = {"tanh", "logistic", "exp", "exp2", "log", "erf", "sin", "cos", "pow", "rsqrt", "sqrt"}
    element = jax.ShapeDtypeStruct((), jnp.float32)

    def count(jaxpr) -> int:
        inner = [p.jaxpr for e in jaxpr.eqns for p in e.params.values() if hasattr(p, "jaxpr")]
        return sum(e.primitive.name in names for e in jaxpr.eqns) + sum(map(count, inner))

    return count(jax.make_jaxpr(function)(*[element] * num_operands).jaxpr)
