"""MXFP4 matrices and MXFP8 rows, decoded to bfloat16 in vector memory.

Codes and scales are put together as integers, one 32-bit word for the two weights of a byte. The
codes are stored with the output columns first; transposing the words puts the bytes along the
sublanes, where the halves of a word are neighbouring rows of a bfloat16 matrix: the words are the
decoded matrix [K, N], and nothing is interleaved. One scale for 16 rows of words is a broadcast.

Exact for scale bytes 1 to 253 while the weight is a normal, finite bfloat16 number. Weights past
the largest finite number are infinite or NaN, and so are all of scale bytes 254 and 255.
"""

import jax
import jax.numpy as jnp
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
        own_codes = codes[0, :, pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)]
        start = pl.multiple_of((first_chunk + chunk) * SCALES, SCALES)
        words = _words(own_codes.astype(jnp.int32).T, transposed_scales[pl.ds(start, SCALES), :])
        rows = pl.ds(pl.multiple_of(chunk * 2 * LANES, 2 * LANES), 2 * LANES)
        decoded[rows, :] = pltpu.bitcast(words, jnp.bfloat16)
        return carry

    jax.lax.fori_loop(0, decoded.shape[0] // (2 * LANES), decode, 0)


def _words(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Bytes [128, N] and scale bytes [8, N] -> pairs of bfloat16 bits, int32 [128, N].

    All arithmetic is on both halves of a word at once; no carry crosses.
    """
    both = 0x00010001
    nibbles = (codes & 0x0F) | ((codes & 0xF0) << 12)
    magnitude = nibbles & (7 * both)
    upper = (magnitude >> 1) | (magnitude >> 2)
    is_nonzero = (magnitude | upper) & both
    is_one = is_nonzero & ~upper
    # Indices 2..7 are (1 + odd / 2) * 2^(index // 2 - 1): index << 6 fills both fields. Index 1
    # is 2^-1, which has no mantissa bit.
    exponents = jnp.maximum(scales - 1, 0) << 7
    bits = _per_byte(exponents * both) + ((magnitude - is_one) << 6)
    bits &= (is_nonzero << 16) - is_nonzero  # all ones in the halves that are not zero
    nan = _per_byte(jnp.where(scales >= 254, 0x7FFF * both, 0))
    return bits | ((nibbles & (8 * both)) << 12) | nan


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
    group = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) // GROUP
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
    normal = jax.lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)
    number = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    number = jnp.where(magnitude == 127, jnp.nan, number)
    return jnp.where(codes < 128, number, -number)
