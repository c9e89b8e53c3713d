"""The Hopper kernels for rows times MXFP4 matrices, which are decoded in shared memory.

Besides the warpgroups that load and multiply, two decode: they read codes and scales of a block,
and write its weights as bfloat16 for wgmma. The halves of the bytes, even and odd input columns,
are blocks of their own, so that nothing is interleaved: a product adds up even columns of rows
times the one and odd columns times the other; the gradient of rows comes in even and odd columns.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_body import RowBody
from pallas_kernels.grouped_matmul.mosaic_gpu_plan import (
    CONSUMERS,
    DEPTH,
    Ring,
    across_columns,
    column_numbers,
    load_tiled,
    load_vector,
    loadable_rows,
    loop,
    matrix_in_smem,
    pad_to,
    round_up,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_rows import FEW_ROWS, RowCall, RowProducts, RowTiles
from pallas_kernels.mxfp4 import GROUP, MXFP4
from pallas_kernels.tiles import choose_tiles

TILES = RowTiles(columns=128)
FEW_TILES = RowTiles(rows=64, columns=128, stages=6)

DECODED = 2  # buffers of decoded blocks: one is written while the other is multiplied

BYTES = GROUP // 2  # codes that share a scale


def multiply_packed(
    products: RowProducts,
    rows: tuple[jax.Array, ...],
    matrices: tuple[MXFP4, ...],
    extras: tuple[jax.Array, ...],
    group_sizes: jax.Array,
) -> tuple[jax.Array, ...]:
    """Like `multiply_rows` with packed matrices; where transposed, the sum of all products.

    Args:
        products: what to compute.
        rows: bfloat16 arrays [M, K], or [M, N] where transposed.
        matrices: packed [E, K, N].
        extras: bfloat16 arrays [M, N] that the epilogue takes besides the products.
        group_sizes: int32 [E].
    """
    num_rows, num_groups = rows[0].shape[0], group_sizes.shape[0]
    if num_rows <= FEW_ROWS * num_groups:
        tiles = choose_tiles("grouped_few_packed_gpu", FEW_TILES)
    else:
        tiles = choose_tiles("grouped_packed_gpu", TILES)
    _, width, num_columns = matrices[0].shape
    # Codes come in blocks of 64 bytes, 128 input columns; output columns in tiles.
    half = round_up(width // 2, DEPTH if not products.transposed else tiles.least_columns)
    padded_columns = round_up(num_columns, 64 * CONSUMERS)
    loadable = loadable_rows(num_rows, tiles.rows)
    codes = [pad_to(w.codes, d1=padded_columns, d2=half) for w in matrices]
    scales = [
        pad_to(jnp.swapaxes(w.scales, 1, 2), d1=half // BYTES, d2=padded_columns) for w in matrices
    ]
    if products.transposed:
        call_type, sizes = _GradientCall, (padded_columns, half)
    else:
        call_type, sizes = _ProductCall, (half, padded_columns)
        rows = tuple(part for x in rows for part in (x[:, 0::2], x[:, 1::2]))
    rows = tuple(pad_to(x, d0=loadable, d1=sizes[0]) for x in rows)
    extras = tuple(pad_to(x, d0=loadable, d1=padded_columns) for x in extras)
    if products.transposed:  # even and odd columns
        products = dataclasses.replace(products, num_outputs=2)
    call = call_type(
        products, tiles, num_rows, *sizes, num_groups, jnp.dtype(jnp.bfloat16), len(extras)
    )
    results = call.run(group_sizes, rows, [*codes, *scales], extras)
    if products.transposed:
        columns = jnp.stack(results, axis=-1)
        return (columns.reshape(num_rows, -1)[:, :width],)
    return tuple(result[:, :num_columns] for result in results)


@dataclasses.dataclass(frozen=True)
class _PackedCall(RowCall):
    """What both kernels share. `width` counts bytes or rows of codes."""

    num_decoders = 2
    registers = (40, 136, 80)

    def make_body(self, stages: int, refs, scratch) -> RowBody:
        return _PackedBody(self, stages, refs, scratch)

    @property
    def flops(self) -> int:
        return 2 * super().flops  # two weights to a byte

    @property
    def num_packed(self) -> int:
        """Packed matrices of one step."""
        return self.num_sums

    @property
    def decoded_bytes(self) -> int:
        return DECODED * self.num_packed * 2 * self.columns * DEPTH * 2

    def packed_buffers(self, stages: int, block: tuple[int, int], scales) -> dict:
        """Shared memory for codes, scales and decoded even and odd columns of matrices."""

        def several(make):
            return [make() for _ in range(self.num_packed)]

        return {
            "codes_smem": several(lambda: matrix_in_smem((stages, *block), jnp.uint8, DEPTH)),
            "scales_smem": several(lambda: plgpu.SMEM((stages, *scales), jnp.uint8)),
            "even_smem": several(lambda: matrix_in_smem((DECODED, *block), jnp.bfloat16)),
            "odd_smem": several(lambda: matrix_in_smem((DECODED, *block), jnp.bfloat16)),
            "decoded": plgpu.Barrier(num_arrivals=self.num_decoders, num_barriers=DECODED),
            "multiplied": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=DECODED),
        }


class _ProductCall(_PackedCall):
    """Rows times matrices: a step multiplies 64 even and 64 odd columns of rows."""

    # Output columns are rows of codes, of which the memory's layout repeats every 8.
    least_columns = 64

    @property
    def copies_per_slot(self) -> int:
        return 2 + 2 * self.num_sums

    @property
    def slot_bytes(self) -> int:
        codes = self.num_sums * self.columns * (DEPTH + DEPTH // BYTES)
        return 2 * self.tiles.rows * DEPTH * 2 + codes

    def buffers(self, stages: int) -> dict:
        rows = (stages, self.tiles.rows, DEPTH)
        return self.packed_buffers(
            stages, (self.columns, DEPTH), (DEPTH // BYTES, self.columns)
        ) | {"rows_smem": [matrix_in_smem(rows, jnp.bfloat16) for _ in range(2)]}


class _GradientCall(_PackedCall):
    """Rows times transposed matrices: a step multiplies 64 columns of rows with 64 of codes."""

    @property
    def num_sums(self) -> int:
        return 2  # even and odd columns

    @property
    def num_packed(self) -> int:
        return 1

    @property
    def copies_per_slot(self) -> int:
        return 3

    @property
    def slot_bytes(self) -> int:
        return DEPTH * (2 * self.tiles.rows + self.columns + self.columns // BYTES)

    def buffers(self, stages: int) -> dict:
        rows = (stages, self.tiles.rows, DEPTH)
        return self.packed_buffers(
            stages, (DEPTH, self.columns), (self.columns // BYTES, DEPTH)
        ) | {"rows_smem": [matrix_in_smem(rows, jnp.bfloat16)]}


class _PackedRing(Ring):
    """The ring of copied blocks, and beside it that of decoded ones, released together."""

    def __init__(self, ring: Ring, decoded: Ring):
        super().__init__(ring.num_slots, ring.full, ring.empty)
        self.decoded = decoded

    def release(self, step: jax.Array) -> None:
        super().release(step)
        self.decoded.release(step)


class _PackedBody(RowBody):
    """The loop over tiles with decoding warpgroups."""

    def __init__(self, call: _PackedCall, num_slots: int, parts, scratch):
        super().__init__(call, num_slots, parts, scratch)
        decoded = Ring(DECODED, scratch["decoded"], scratch["multiplied"])
        self.ring = _PackedRing(self.ring, decoded)
        number = len(self.matrices) // 2
        self.matrices = list(zip(self.matrices[:number], self.matrices[number:], strict=True))
        if not call.products.transposed:
            self.rows = [self.rows]  # even and odd columns of the only rows

    def load(self, rows, matrices, start, column, group, step, slot) -> None:
        """Copy the blocks of one step: of rows, and codes and scales of each matrix."""
        call = self.call
        rows = rows if isinstance(rows, list) else [rows]
        barrier = self.smem["full"].at[slot]
        depth = pl.ds(step * DEPTH, DEPTH)
        for x, smem in zip(rows, self.smem["rows_smem"], strict=True):
            here = x.at[pl.ds(start, call.tiles.rows), depth]
            plgpu.copy_gmem_to_smem(here, smem.at[slot], barrier)
        columns = pl.ds(column, call.columns)
        if call.products.transposed:
            codes_window, begin, count = (depth, columns), column, call.columns
            others = depth
        else:
            codes_window, begin, count = (columns, depth), step * DEPTH, DEPTH
            others = columns
        scales_window = (pl.ds(lax.div(begin, jnp.int32(BYTES)), count // BYTES), others)
        pairs = zip(matrices, self.smem["codes_smem"], self.smem["scales_smem"], strict=True)
        for (codes, scales), codes_smem, scales_smem in pairs:
            plgpu.copy_gmem_to_smem(codes.at[group, *codes_window], codes_smem.at[slot], barrier)
            plgpu.copy_gmem_to_smem(scales.at[group, *scales_window], scales_smem.at[slot], barrier)

    def multiply(self, sums, step, slot, rows, columns) -> None:
        """Issue the products of one step when its matrices are decoded."""
        block = self.ring.decoded.wait_full(step)
        x, even, odd = (self.smem[name] for name in ("rows_smem", "even_smem", "odd_smem"))
        if self.call.products.transposed:
            for total, (matrix,) in zip(sums, (even, odd), strict=True):
                plgpu.wgmma(total, x[0].at[slot, rows], matrix.at[block, :, columns])
            return
        for total, *halves in zip(sums, even, odd, strict=True):
            for part, matrix in zip(x, halves, strict=True):
                transposed = matrix.at[block, columns].transpose((1, 0))
                plgpu.wgmma(total, part.at[slot, rows], transposed)

    def decode_tile(self, tile, column, group, first_step, steps) -> None:
        """Decode the matrices of one tile, each decoder its share of every block."""
        decoder = self.warpgroup - (CONSUMERS + 1)

        def decode_step(i):
            slot = self.ring.wait_full(first_step + i)
            block = self.ring.decoded.wait_empty(first_step + i)
            names = ("codes_smem", "scales_smem", "even_smem", "odd_smem")
            for codes, scales, even, odd in zip(*(self.smem[name] for name in names), strict=True):
                packed, weights = (codes.at[slot], scales.at[slot]), (even.at[block], odd.at[block])
                _decode_block(decoder, self.call.num_decoders, *packed, *weights)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.ring.decoded.full.at[block])

        loop(steps, decode_step)


def _decode_block(decoder, num_decoders: int, codes, scales, even, odd) -> None:
    """Decode this decoder's share of codes [R, B] with scales [B / 16, R]: 64 x 64 at a time."""
    pieces = [
        (row, column)
        for row in range(0, codes.shape[0], 64)
        for column in range(0, codes.shape[1], DEPTH)
    ]
    for number, (row, column) in enumerate(pieces):

        @pl.when(decoder == number % num_decoders)
        def _(row=row, column=column):
            rows, columns = pl.ds(row, 64), pl.ds(column, DEPTH)
            piece = load_tiled(codes.at[rows, columns]).astype(jnp.int32)
            factors = _spread(
                [
                    _factor(load_vector(scales.at[column // BYTES + n, rows]).astype(jnp.int32))
                    for n in range(DEPTH // BYTES)
                ]
            )
            even[rows, columns] = _decode(piece, factors)
            odd[rows, columns] = _decode(lax.shift_right_logical(piece, jnp.int32(4)), factors)


def _factor(scale: jax.Array) -> jax.Array:
    """2^(scale - 127) as float32, exact for all bytes; 255 is NaN."""
    bits = jnp.where(scale == 0, jnp.int32(1 << 22), scale << 23)
    bits = jnp.where(scale == 255, jnp.int32(0x7FC00000), bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _spread(factors: list[jax.Array]) -> jax.Array:
    """[R] for each 16 columns -> [R, 64]."""
    shape = (factors[0].shape[0], DEPTH)
    column = column_numbers(shape)
    wide = [across_columns(factor, DEPTH) for factor in factors]
    result = wide[-1]
    for n in reversed(range(len(wide) - 1)):
        result = jnp.where(column < (n + 1) * BYTES, wide[n], result)
    return result


def _decode(codes: jax.Array, factors: jax.Array) -> jax.Array:
    """Weights of the low four bits of each int32.

    The bits of a magnitude are low exponent and high mantissa bits of a float16 number, which is
    2^-14 times as large, subnormals included.
    """
    bits = ((codes & 7) << 9) | ((codes & 8) << 12)
    numbers = lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16).astype(jnp.float32)
    return (numbers * jnp.float32(2**14) * factors).astype(jnp.bfloat16)
