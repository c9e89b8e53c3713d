"""Expert products: one rank's rows of a training step, the same packed, and a decoding step.

A rank of 64 holds 14 of 896 experts, fetches up to 14 more, and gets 8192 x 16 rows.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernel_cases.case import KernelCase
from pallas_kernels import MXFP4, SituGLU, grouped_glu, grouped_matmul, quantize_mxfp8
from pallas_kernels.dispatch import BUILT
from pallas_kernels.grouped_matmul import mosaic_gpu_matrices, mosaic_gpu_rows
from pallas_kernels.grouped_matmul.mosaic_tpu_matrices import MatrixTiles
from pallas_kernels.grouped_matmul.mosaic_tpu_rows import RowTiles

_ACTIVATION = SituGLU(4.0, 25.0)
_IMPLEMENTATIONS = tuple(name for name in BUILT["grouped_matmul"] if name != "reference")


@dataclasses.dataclass(frozen=True)
class _Shape:
    size: str
    rows: int
    groups: int
    width: int
    columns: int

    @property
    def group_sizes(self) -> np.ndarray:
        """Skewed as a busy layer is: group e gets a share of 1 / (e + 2), the last one nothing."""
        share = 1 / np.arange(2, self.groups + 2)
        share[-1] = 0
        ends = np.round(np.cumsum(share) / share.sum() * self.rows)
        return np.diff(ends, prepend=0).astype(np.int32)

    @property
    def used_groups(self) -> int:
        return int((self.group_sizes > 0).sum())


_UP = _Shape("k3", 131072, 28, 3584, 3072)
_DOWN = _Shape("k3", 131072, 28, 3072, 3584)
_DECODE = _Shape("k3", 64, 112, 3584, 3072)  # eight devices hold all experts
_SMALL = _Shape("small", 512, 8, 256, 256)
_MANY = _Shape("small", 2048, 128, 256, 512)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _inputs(shape: _Shape, kind: str, num_matrices: int):
    """Rows (`kind` "mxfp8": quantised), matrices, cotangent of the output, group sizes."""
    keys = jax.random.split(jax.random.key(0), 2 + 2 * num_matrices)
    dtype = jnp.float32 if kind == "float32" else jnp.bfloat16
    x = jax.random.normal(keys[0], (shape.rows, shape.width), dtype)
    d_output = jax.random.normal(keys[1], (shape.rows, shape.columns), dtype)
    size, matrices = (shape.groups, shape.width, shape.columns), []
    for first, second in zip(keys[2::2], keys[3::2], strict=True):
        if kind in ("bf16", "float32"):
            matrices.append(jax.random.normal(first, size, dtype) * shape.width**-0.5)
            continue
        codes = jax.random.bits(first, (size[0], size[2], size[1] // 2), jnp.uint8)
        scales = jax.random.bits(second, (size[0], size[2], size[1] // 32), jnp.uint8)
        matrices.append(MXFP4(codes, 118 + scales % 4))
    return (
        quantize_mxfp8(x) if kind == "mxfp8" else x,
        tuple(matrices),
        d_output,
        jnp.asarray(shape.group_sizes),
    )


def _product(implementation: str, x, matrices, group_sizes):
    if len(matrices) == 1:
        return grouped_matmul(x, *matrices, group_sizes, implementation=implementation)
    return grouped_glu(
        x, *matrices, group_sizes, activation=_ACTIVATION, implementation=implementation
    )


def _ragged(x, matrices, group_sizes):
    if not isinstance(x, jax.Array):
        x = x.dequantize(jnp.bfloat16)
    products = []
    for matrix in matrices:
        if isinstance(matrix, MXFP4):
            matrix = matrix.dequantize(jnp.bfloat16)
        product = jax.lax.ragged_dot(x, matrix, group_sizes, preferred_element_type=jnp.float32)
        products.append(product)
    hidden = products[0] if len(products) == 1 else _ACTIVATION(*products)
    return hidden.astype(x.dtype)


def _forward(product: Callable):
    return lambda x, matrices, d_output, group_sizes: product(x, matrices, group_sizes)


def _forward_and_backward(product: Callable):
    def run(x, matrices, d_output, group_sizes):
        if isinstance(matrices[0], MXFP4):  # constants
            output, transpose = jax.vjp(lambda x: product(x, matrices, group_sizes), x)
        else:
            output, transpose = jax.vjp(lambda *both: product(*both, group_sizes), x, matrices)
        return output, transpose(d_output)

    return run


def _case(shape: _Shape, kind: str, num_matrices: int, *, backward: bool, label: str) -> KernelCase:
    wrap = _forward_and_backward if backward else _forward
    bits = {"float32": 32, "bf16": 16, "mxfp4": 4.25, "mxfp8": 4.25}[kind]
    matrix_bytes = shape.used_groups * shape.width * shape.columns * bits / 8 * num_matrices
    input_bits = {"float32": 32, "mxfp8": 8.25}.get(kind, 16)
    input_bytes = shape.rows * shape.width * input_bits / 8
    output_bytes = shape.rows * shape.columns * (4 if kind == "float32" else 2)
    flops = 2 * shape.rows * shape.width * shape.columns * num_matrices
    total = input_bytes + matrix_bytes + output_bytes
    if backward:  # rows and their gradient, the cotangent, matrices and their gradients
        total += (
            2 * input_bytes
            + output_bytes
            + matrix_bytes * (2 if kind in ("bf16", "float32") else 1)
        )
    # The products once more for the activation's gradient, those of dx, those of the matrices.
    passes = 1 + backward * (1 + (kind in ("bf16", "float32")) + (num_matrices == 2))
    return KernelCase(
        op="grouped_matmul",
        name=label + (" forward+backward" if backward else " forward"),
        size=shape.size,
        make_inputs=functools.partial(_inputs, shape, kind, num_matrices),
        function=lambda implementation: wrap(functools.partial(_product, implementation)),
        flops=flops * passes,
        bytes=total,
        implementations=_IMPLEMENTATIONS,
        baselines={"lax.ragged_dot": wrap(_ragged)},
        candidates=_candidates(shape, backward and kind in ("bf16", "float32"))
        | _gpu_candidates(shape, kind in ("bf16", "float32"), backward),
    )


def _candidates(shape: _Shape, has_matrices: bool) -> dict:
    if shape.size != "k3":
        return {}
    if shape.rows <= 64:
        return {
            "grouped_decode_tpu": tuple(
                RowTiles(rows=64, part=part, columns=columns, weight_bytes=size << 20)
                for part in (16, 32, 64)
                for columns, size in ((256, 4), (512, 8))
            )
        }
    candidates = {
        "grouped_rows_tpu": tuple(
            RowTiles(rows=rows, part=128, columns=columns, weight_bytes=size << 20)
            for rows, columns, size in (
                *((256, 256, 6), (256, 512, 12), (512, 256, 6), (512, 256, 12)),
                *((512, 512, 12), (512, 768, 12), (1024, 256, 6)),
            )
        )
    }
    if has_matrices:
        candidates["grouped_matrices_tpu"] = tuple(
            MatrixTiles(rows=rows, part=128, height=height, block=block, sum_bytes=size << 20)
            for rows, height, block, size in (
                *((256, 256, 1024, 6), (512, 256, 1792, 12), (512, 512, 1792, 12)),
                *((1024, 256, 1024, 6), (1024, 128, 1792, 12)),
            )
        )
    return candidates


def _gpu_candidates(shape: _Shape, is_plain: bool, backward: bool) -> dict:
    if shape.size != "k3":
        return {}
    form = "rows" if is_plain else "packed"
    if shape.rows <= 64:
        return {
            f"grouped_few_{form}_gpu": tuple(
                mosaic_gpu_rows.RowTiles(rows=64, columns=columns, stages=stages, chunk=chunk)
                for columns in ((128, 256) if is_plain else (128,))
                for stages in (4, 8)
                for chunk in (32, 64)
            )
        }
    candidates = {
        f"grouped_{form}_gpu": tuple(
            mosaic_gpu_rows.RowTiles(columns=columns, stages=stages, chunk=chunk)
            for columns in ((128, 256) if is_plain else (128,))
            for stages, chunk in ((3, 64), (4, 32), (6, 32))
        )
    }
    if is_plain and backward:
        candidates["grouped_matrices_gpu"] = tuple(
            mosaic_gpu_matrices.MatrixTiles(columns=columns, stages=stages, chunk=chunk)
            for columns in (128, 256)
            for stages, chunk in ((3, 64), (4, 32), (6, 32))
        )
    return candidates


CASES = [
    _case(_UP, "bf16", 1, backward=False, label="up bf16"),
    _case(_UP, "bf16", 1, backward=True, label="up bf16"),
    _case(_DOWN, "bf16", 1, backward=True, label="down bf16"),
    _case(_UP, "bf16", 2, backward=True, label="gate and up bf16"),
    _case(_UP, "mxfp4", 2, backward=True, label="gate and up MXFP4"),
    _case(_UP, "mxfp8", 2, backward=False, label="gate and up MXFP4 x MXFP8"),
    _case(_DOWN, "mxfp4", 1, backward=False, label="down MXFP4"),
    _case(_DECODE, "bf16", 2, backward=False, label="64 rows gate and up bf16"),
    _case(_DECODE, "mxfp4", 2, backward=False, label="64 rows gate and up MXFP4"),
    _case(_DECODE, "mxfp8", 1, backward=False, label="64 rows up MXFP4 x MXFP8"),
    _case(_SMALL, "bf16", 1, backward=True, label="bf16"),
    _case(_MANY, "float32", 1, backward=True, label="128 groups float32"),
    _case(_MANY, "bf16", 1, backward=True, label="128 groups bf16"),
    _case(_SMALL, "bf16", 2, backward=True, label="gate and up bf16"),
    _case(_SMALL, "mxfp4", 1, backward=True, label="MXFP4"),
]
