"""Grouped products on Hopper GPUs: rows times matrices, plain or packed, and matrix gradients.

bfloat16 operands are multiplied by wgmma with float32 accumulators in registers. float32 operands
are sums of three bfloat16 parts, of whose nine products the six largest are added up; what they
leave out is below the rounding of float32. MXFP4 matrices are decoded block by block in shared
memory; MXFP8 rows are written out as bfloat16 before the kernel.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.checks import align_varying
from pallas_kernels.grouped_matmul.activations import gradients_of
from pallas_kernels.grouped_matmul.mosaic_gpu_matrices import multiply_groups
from pallas_kernels.grouped_matmul.mosaic_gpu_packed import multiply_packed
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import RowProducts, multiply_rows
from pallas_kernels.mxfp4 import MXFP4
from pallas_kernels.mxfp8 import MXFP8


def unsupported(x: jax.Array | MXFP8, *weights: jax.Array | MXFP4) -> str | None:
    """Why the kernels do not take these arguments, or None; any K and N are supported."""
    is_packed = isinstance(weights[0], MXFP4)
    if not isinstance(x, MXFP8) and x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x has dtype {x.dtype}; float32 and bfloat16 are supported"
    if is_packed and not isinstance(x, MXFP8) and x.dtype != jnp.bfloat16:
        return f"x has dtype {x.dtype}; with MXFP4 weights bfloat16 and MXFP8 are supported"
    for matrices in () if is_packed else weights:
        if matrices.dtype != x.dtype:
            return f"weights have dtype {matrices.dtype} and x {x.dtype}; they must be equal"
    if 0 in x.shape or 0 in weights[0].shape:
        return f"x {x.shape} and weights {weights[0].shape} must not be empty; use 'xla'"
    return None


def grouped_matmul(x, weights, group_sizes: jax.Array) -> jax.Array:
    """See `pallas_kernels.grouped_matmul`."""
    leaves, structure = jax.tree.flatten((_unpacked(x), weights, group_sizes))
    return _product(*jax.tree.unflatten(structure, align_varying(*leaves)))


def grouped_glu(x, gate, up, group_sizes: jax.Array, activation) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_glu`."""
    leaves, structure = jax.tree.flatten((_unpacked(x), gate, up, group_sizes))
    x, gate, up, group_sizes = jax.tree.unflatten(structure, align_varying(*leaves))
    if x.dtype == jnp.float32:
        a, b = (_product(x, matrices, group_sizes) for matrices in (gate, up))
        belongs = jnp.arange(x.shape[0])[:, None] < group_sizes.sum()
        return jnp.where(belongs, activation(a, b), 0)
    return _gated(activation, x, gate, up, group_sizes)


def _unpacked(x: jax.Array | MXFP8) -> jax.Array:
    """Rows in bfloat16; those that were MXFP8 are constants to `jax.grad`."""
    return jax.lax.stop_gradient(x.dequantize(jnp.bfloat16)) if isinstance(x, MXFP8) else x


def _plain(sums, extras):
    return sums


@jax.custom_vjp
def _product(x, weights, group_sizes):
    return _multiply("grouped_matmul", (x,), (weights,), group_sizes, transposed=False)


def _product_forward(x, weights, group_sizes):
    return _product(x, weights, group_sizes), (x, weights, group_sizes)


def _product_backward(operands, d_output):
    x, weights, group_sizes = operands
    d_x = _multiply("grouped_gradient", (d_output,), (weights,), group_sizes, transposed=True)
    return d_x, _gradient_of(weights, x, d_output, group_sizes), None


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation, x, gate, up, group_sizes):
    products = RowProducts(
        name="grouped_glu",
        operand_of=(0, 0),
        transposed=False,
        epilogue=lambda sums, extras: [activation(*sums)],
    )
    return _compute(products, (x,), (gate, up), (), group_sizes)[0]


def _gated_forward(activation, x, gate, up, group_sizes):
    return _gated(activation, x, gate, up, group_sizes), (x, gate, up, group_sizes)


def _gated_backward(activation, operands, d_output):
    """The products once more, with the gradients of both, then the three products with those."""
    x, gate, up, group_sizes = operands
    gradients = gradients_of(activation)
    products = RowProducts(
        name="grouped_glu_gradient",
        operand_of=(0, 0),
        transposed=False,
        epilogue=lambda sums, extras: gradients(*sums, *extras),
        num_outputs=2,
    )
    d_a, d_b = _compute(products, (x,), (gate, up), (d_output,), group_sizes)
    d_x = _multiply("grouped_gradient", (d_a, d_b), (gate, up), group_sizes, transposed=True)
    d_gate = _gradient_of(gate, x, d_a, group_sizes)
    d_up = _gradient_of(up, x, d_b, group_sizes)
    return d_x, d_gate, d_up, None


_gated.defvjp(_gated_forward, _gated_backward)


def _multiply(name: str, rows, matrices, group_sizes, *, transposed: bool) -> jax.Array:
    """The sum of the products of each rows with its matrices, in the dtype of the rows."""
    dtype = rows[0].dtype
    operand_of = tuple(range(len(rows)))
    if dtype == jnp.float32:
        rows = [part for x in rows for part in _parts(x)]
        matrices = [part for w in matrices for part in _parts(w)]
        pairs = [(3 * n + i, 3 * n + j) for n in operand_of for i, j in _PAIRS]
        operand_of = tuple(i for i, _ in pairs)
        matrices = [matrices[j] for _, j in pairs]
    products = RowProducts(
        name=name, operand_of=operand_of, transposed=transposed, epilogue=_plain, summed=True
    )
    return _compute(products, tuple(rows), tuple(matrices), (), group_sizes, dtype)[0]


def _compute(products: RowProducts, rows, matrices, extras, group_sizes, dtype=jnp.bfloat16):
    if isinstance(matrices[0], MXFP4):
        return multiply_packed(products, rows, matrices, extras, group_sizes)
    return multiply_rows(products, rows, matrices, extras, group_sizes, dtype)


def _gradient_of(weights, x, d_products, group_sizes) -> jax.Array | None:
    """The gradient of matrices that were multiplied with x; packed ones have none."""
    if isinstance(weights, MXFP4):
        return None
    if x.dtype == jnp.float32:
        x, d_products = _parts(x), _parts(d_products)
        return sum(
            multiply_groups(x[i], d_products[j], group_sizes, jnp.float32) for i, j in _PAIRS
        )
    return multiply_groups(x, d_products, group_sizes, weights.dtype)


# Which parts of two float32 numbers are multiplied, the smallest products first.
_PAIRS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))


def _parts(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays whose sum is x: its mantissa in three times eight bits."""
    parts = []
    for _ in range(3):
        # By bits: a compiler may take a cast to bfloat16 and back for the identity.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts
