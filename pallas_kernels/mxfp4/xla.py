"""Decoding and quantising MXFP4 by integer arithmetic on the bits of the numbers.

Processors flush subnormal operands and results of float arithmetic to zero, and some conversions
between float types do so, too. The ends of the exponent range therefore come out exact only where
the bits are put together as integers, which is also as fast: a weight has one mantissa bit.

Even and odd columns, the halves of the bytes, are decoded into arrays of their own: loops over
them are contiguous and vectorise, loops over interleaved columns do not.
"""

import jax
import jax.numpy as jnp
import numpy as np

GROUP = 32

# The scale byte is the exponent field of the largest magnitude of the group, plus one where the
# mantissa is above the rule's bound (1 never, 1.75, 1.5 exclusive), minus 2. Adding this number
# to the bits of a float32 carries into the exponent field exactly there.
CARRY = {"floor": 0, "even": 1 << 21, "ceil": (1 << 22) - 1}

_INFINITY = 0x7F80  # as bfloat16


def dequantize(codes: jax.Array, scales: jax.Array, dtype) -> jax.Array:
    """[..., out, in/2] and [..., out, in/32] -> [..., in, out] in `dtype`."""
    dtype = jnp.dtype(dtype)
    even, odd = (bits.astype(jnp.uint32) for bits in _bits_of_columns(codes, scales))
    # A pair of columns as one word: the processor's order of bytes puts the low half first.
    weights = jax.lax.bitcast_convert_type(even | odd << 16, jnp.bfloat16)
    weights = weights.reshape(*codes.shape[:-1], -1)
    if dtype == jnp.float32:  # by bits, since a conversion may flush subnormals
        bits = jax.lax.bitcast_convert_type(weights, jnp.uint16).astype(jnp.uint32)
        weights = jax.lax.bitcast_convert_type(bits << 16, jnp.float32)
    elif dtype != jnp.bfloat16:
        weights = weights.astype(dtype)
    return jnp.swapaxes(weights, -1, -2)


def decode_columns(codes: jax.Array, scales: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Even and odd input columns, each [..., out, in/2]; bfloat16 and float32 are exact."""
    if dtype == jnp.bfloat16:
        return tuple(
            jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
            for bits in _bits_of_columns(codes, scales)
        )
    return tuple(
        jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)
        for bits in _bits_of_columns(codes, scales)
    )


def stream_scales(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Factors of `stream_columns` [..., out, in/32], and of the sums [..., out], float32.

    The first hold 2^14 besides the scale, unless that would overflow somewhere in the row.
    """
    is_nan = scales == 255
    top = jnp.where(is_nan, 0, scales).max(-1)
    is_large = top > 254 - 14
    exponents = scales.astype(jnp.uint32) + jnp.where(is_large, 0, jnp.uint32(14))[..., None]
    bits = jnp.where(is_nan, jnp.uint32(0x7FC00000), exponents << 23)
    factors = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return factors, jnp.where(is_large, jnp.float32(2**14), jnp.float32(1))


def stream_columns(codes: jax.Array, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Even and odd columns in float32 by the fewest instructions, for weights used only once.

    The three bits of a magnitude are the low exponent and high mantissa bits of a float16, whose
    conversion treats subnormals (code 1) as E2M1 does: 2^-14 times the magnitude comes out.
    Equals `decode_columns`, but subnormal weights are zero where arithmetic flushes them.

    Args:
        codes: [..., out, in/2].
        factors: from `stream_scales`, computed beforehand: here they would be computed anew for
            every column.
    """
    signed = jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int16)
    # The arithmetic shift spreads the sign over bits 12 to 15; of those the mask keeps 15.
    mask = np.uint16(0x8E00).view(np.int16)
    halves = ((signed << 12) >> 3) & mask, (signed << 5) & mask
    factors = _per_column(factors)
    return tuple(
        jax.lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * factors
        for half in halves
    )


def _bits_of_columns(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bfloat16 bits (uint16) of the even and the odd columns."""
    wide = codes.astype(jnp.uint16)
    return _bfloat16_bits(wide & 15, scales), _bfloat16_bits(wide >> 4, scales)


def _bfloat16_bits(nibbles: jax.Array, scales: jax.Array) -> jax.Array:
    """Bits of code * 2^(scale - 127), exact for every pair; all uint16, modulo 2^16."""
    magnitude = nibbles & 7
    scale = scales.astype(jnp.uint16)
    # Indices 2..7 are (1 + odd / 2) * 2^(index // 2 - 1): index << 6 fills both fields.
    base = (scale - 1) << 7
    bits = jnp.minimum(_per_column(base) + (magnitude << 6), _INFINITY)
    # Scale byte 0: indices 2 and 3 are subnormal, multiples of 0.5 * 2^-127 = 32 * 2^-133.
    bits = jnp.maximum(bits, magnitude << 5)
    half = jnp.where(scale < 2, 32 << scale, base)  # index 1, subnormal below scale byte 2
    bits = jnp.where(magnitude == 1, _per_column(half), bits)
    bits = jnp.where(magnitude == 0, 0, bits)
    is_nan = _per_column(jnp.where(scale == 255, jnp.uint16(0x7FFF), jnp.uint16(0)))
    return bits | (nibbles & 8) << 12 | is_nan


def _per_column(group_values: jax.Array) -> jax.Array:
    """[..., in/32] -> [..., in/2]: one entry per byte."""
    repeated = jnp.broadcast_to(group_values[..., None], (*group_values.shape, GROUP // 2))
    return repeated.reshape(*group_values.shape[:-1], -1)


# Scale byte above which 6 * 2^(scale - 127) is no finite number: larger weights saturate.
MAX_SCALE = 252


def quantize(weights: jax.Array, rule: str) -> tuple[jax.Array, jax.Array]:
    """[..., in, out] -> codes [..., out, in/2], scales [..., out, in/32]."""
    rows = jnp.swapaxes(weights.astype(jnp.float32), -1, -2)
    groups = rows.reshape(*rows.shape[:-1], -1, GROUP)
    bits = jax.lax.bitcast_convert_type(groups, jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    largest = magnitude.max(-1)
    exponent = ((largest + CARRY[rule]) >> 23).astype(jnp.int32) - 2
    scales = jnp.clip(exponent, 0, MAX_SCALE).astype(jnp.uint8)
    scales = jnp.where(largest >= 0x7F800000, jnp.uint8(255), scales)
    scaled = _divide(magnitude, scales[..., None].astype(jnp.uint32))
    # How many of the seven boundaries lie below: ties go to the even index.
    above = (0.25, 1.25, 2.5, 5.0)
    from_on = (0.75, 1.75, 3.5)
    index = sum((scaled > bound).astype(jnp.uint8) for bound in above)
    index += sum((scaled >= bound).astype(jnp.uint8) for bound in from_on)
    nibbles = index | (bits >> 31).astype(jnp.uint8) << 3
    pairs = nibbles.reshape(*rows.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def _divide(magnitude: jax.Array, scales: jax.Array) -> jax.Array:
    """Float32 of these bits, which may be subnormal, by 2^(scale - 127)."""
    as_float = jax.lax.bitcast_convert_type
    inverse = as_float((254 - jnp.minimum(scales, 253)) << 23, jnp.float32)
    # A subnormal is its bits * 2^-149: as an integer it is not flushed.
    small = magnitude.astype(jnp.int32).astype(jnp.float32) * 2.0**-23
    small *= as_float((128 - jnp.minimum(scales, 100)) << 23, jnp.float32)
    normal = as_float(magnitude, jnp.float32) * inverse
    return jnp.where(magnitude < 1 << 23, small, normal)
