"""MXFP4 matrices and MXFP8 rows, decoded to bfloat16 in vector memory.

The two codes of a byte become the halves of a 32-bit word, by arithmetic on both at once. The codes
are stored with the output columns first; transposing the words puts the bytes along the sublanes,
where the halves of a word are neighbouring rows of a bfloat16 matrix: the words are the decoded
matrix [K, N], and nothing is interleaved. One scale for 16 rows of words is a broadcast, and its
product with the weights is exact: subnormal numbers are zero, weights past the largest finite
number infinite, and all weights of a group with scale byte 255 NaN.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mxfp4 import GROUP
from pallas_kernels.mxfp8 import exponent_factor

LANES = 128
BYTES = GROUP // 2  # codes of a group of weights
SCALES = LANES // BYTES  # scales of a chunk of codes


def scale_scratch(rows: int, columns: int) -> pltpu.VMEM:
    """Scratch of `decode_matrix` for the scales of [rows, columns] weights."""
    return pltpu.VMEM((rows // GROUP, columns), jnp.int32)


def decode_matrix(codes, scales, decoded, transposed_scales, first_chunk) -> None:
    """Write weights [rows, columns] into `decoded`.

    Args:
        codes: uint8 reference [1, columns, rows/2], rows a multiple of 256.
        scales: uint8 reference [1, columns, K/32] of all rows of the matrix.
        decoded: bfloat16 reference [rows, columns].
        transposed_scales: scratch [K/32, columns].
        first_chunk: which 256 rows of the matrix `codes` begins with.
    """
    transposed_scales[...] = scales[0].astype(jnp.int32).T

    def decode(chunk, carry):
        own = codes[0, :, pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)]
        weights = _weights(pltpu.bitcast(own, jnp.int8).astype(jnp.int32).T)
        start = pl.multiple_of((first_chunk + chunk) * SCALES, SCALES)
        factors = _per_byte(_factor_bits(transposed_scales[pl.ds(start, SCALES), :]))
        rows = pl.ds(pl.multiple_of(chunk * 2 * LANES, 2 * LANES), 2 * LANES)
        decoded[rows, :] = weights * pltpu.bitcast(factors, jnp.bfloat16)
        return carry

    lax.fori_loop(0, decoded.shape[0] // (2 * LANES), decode, 0)


def _weights(codes: jax.Array) -> jax.Array:
    """Bytes [128, N], int32, of any upper bits -> numbers of E2M1 codes, bfloat16 [256, N]."""
    both = 0x00010001
    nibbles = (codes & 0x0F) | ((codes & 0xF0) << 12)
    # As fields of bfloat16 next to the exponent of 1/2, indices 2..7 are the numbers that they
    # stand for, (1 + odd / 2) * 2^(index // 2 - 1). Indices 0 and 1 are 1/2 and 3/4 and should be 0
    # and 1/2, as if without the leading one: twice the number, less 1.
    bits = ((nibbles & (7 * both)) << 6) + 0x3F00 * both
    number = pltpu.bitcast(bits, jnp.bfloat16)
    number += jnp.minimum(number - 1, 0)
    sign = (nibbles & (8 * both)) << 12
    return pltpu.bitcast(pltpu.bitcast(number, jnp.int32) | sign, jnp.bfloat16)


def _factor_bits(scales: jax.Array) -> jax.Array:
    """Bits of 2^(scale - 127) as bfloat16, in both halves of a word."""
    bits = jnp.where(scales == 255, 0x7FC0, scales << 7)
    return bits | (bits << 16)


def _per_byte(group_values: jax.Array) -> jax.Array:
    """[8, N] -> [128, N]: each row 16 times."""
    groups, columns = group_values.shape
    repeated = jnp.broadcast_to(group_values[:, None], (groups, BYTES, columns))
    return repeated.reshape(groups * BYTES, columns)


def decode_rows(codes, scales, decoded) -> None:
    """Write MXFP8 rows into `decoded`.

    Args:
        codes: uint8 reference [rows, K].
        scales: uint8 reference [rows, S], S at least K/32 and a multiple of 128.
        decoded: bfloat16 reference [rows, K].
    """
    rows, width = codes.shape
    group = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) // GROUP
    own_scales, page = None, None
    for chunk in range(width // LANES):
        if page != chunk // GROUP:  # 128 scales serve 32 chunks of 128 columns
            page = chunk // GROUP
            own_scales = scales[:, page * LANES : (page + 1) * LANES].astype(jnp.int32)
        index = group + chunk % GROUP * (LANES // GROUP)
        factors = exponent_factor(jnp.take_along_axis(own_scales, index, axis=1))
        columns = slice(chunk * LANES, (chunk + 1) * LANES)
        decoded[:, columns] = (_e4m3(codes[:, columns].astype(jnp.int32)) * factors).astype(
            jnp.bfloat16
        )


def _e4m3(codes: jax.Array) -> jax.Array:
    """Numbers of E4M3 codes (int32), in float32."""
    magnitude = codes & 127
    # The exponent field moves from bias 7 to bias 127; below 8 the number has no leading one.
    normal = lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)
    number = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    number = jnp.where(magnitude == 127, jnp.nan, number)
    return jnp.where(codes < 128, number, -number)
