"""Decoding and quantising MXFP4 by integer arithmetic on the bits of the numbers.

Processors flush subnormal operands and results of float arithmetic to zero, and some conversions
between float types do so, too. The ends of the exponent range therefore come out exact only where
the bits are put together as integers, which is also as fast: a weight has one mantissa bit.
"""

import jax
import jax.numpy as jnp

GROUP = 32

# The scale byte is the exponent field of the largest magnitude of the group, plus one where the
# mantissa is above the rule's bound (1 never, 1.75, 1.5 exclusive), minus 2. Adding this number
# to the bits of a float32 carries into the exponent field exactly there.
CARRY = {"floor": 0, "even": 1 << 21, "ceil": (1 << 22) - 1}


def dequantize(codes: jax.Array, scales: jax.Array, dtype) -> jax.Array:
    """[..., out, in/2] and [..., out, in/32] -> [..., in, out] in `dtype`."""
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        # float16 is too narrow for most scales; rounding from float32 is all that can be done.
        return dequantize(codes, scales, jnp.float32).astype(dtype)
    shift = jnp.array([0, 4], jnp.uint8)
    nibbles = ((codes[..., None] >> shift) & 15).reshape(*scales.shape, GROUP)
    bits = bfloat16_bits(nibbles, scales[..., None])
    if dtype == jnp.bfloat16:
        weights = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    else:
        weights = jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
    return jnp.swapaxes(weights.reshape(*codes.shape[:-1], -1), -1, -2)


def bfloat16_bits(nibbles: jax.Array, scales: jax.Array) -> jax.Array:
    """Bits (uint16) of code * 2^(scale - 127) as bfloat16, exact for every pair."""
    magnitude = (nibbles & 7).astype(jnp.int16)
    sign = (nibbles >> 3).astype(jnp.uint16) << 15
    scale = scales.astype(jnp.int16)
    # Indices 2..7 are (1 + odd / 2) * 2^(index / 2 - 1): index << 6 places both fields.
    exact = ((scale - 1) << 7) + (magnitude << 6)
    exact = jnp.where(magnitude == 1, (scale - 1) << 7, exact)
    # Subnormal: multiples of 2^-133, where 0.5 * 2^-127 is 32 of them.
    halves = jnp.where(magnitude < 4, magnitude, 2 * magnitude - 4)
    halves = jnp.where(magnitude == 7, 12, halves)
    exact = jnp.where(scale == 0, jnp.where(halves < 4, halves << 5, exact), exact)
    exact = jnp.where((scale == 1) & (magnitude == 1), 1 << 6, exact)
    exact = jnp.where(magnitude == 0, 0, exact)
    exact = jnp.where(exact < 0x7F80, exact, 0x7F80)  # past the largest number: infinity
    exact = jnp.where((scale >= 254) & (magnitude >= 4), 0x7F80, exact)  # int16 wrapped around
    exact = jnp.where(scale == 255, 0x7FC0, exact)
    return exact.astype(jnp.uint16) | sign


def quantize(weights: jax.Array, rule: str) -> tuple[jax.Array, jax.Array]:
    """[..., in, out] -> codes [..., out, in/2], scales [..., out, in/32]."""
    rows = jnp.swapaxes(weights.astype(jnp.float32), -1, -2)
    groups = rows.reshape(*rows.shape[:-1], -1, GROUP)
    bits = jax.lax.bitcast_convert_type(groups, jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    largest = magnitude.max(-1)
    exponent = ((largest + CARRY[rule]) >> 23).astype(jnp.int32) - 2
    scales = jnp.clip(exponent, 0, 254).astype(jnp.uint8)
    scales = jnp.where(largest >= 0x7F800000, jnp.uint8(255), scales)
    scaled = _scaled(magnitude, scales[..., None].astype(jnp.uint32))
    # How many of the seven boundaries lie below: ties go to the even index.
    above = (0.25, 1.25, 2.5, 5.0)
    from_on = (0.75, 1.75, 3.5)
    index = sum((scaled > bound).astype(jnp.uint8) for bound in above)
    index += sum((scaled >= bound).astype(jnp.uint8) for bound in from_on)
    nibbles = index | (bits >> 31).astype(jnp.uint8) << 3
    pairs = nibbles.reshape(*rows.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def _scaled(magnitude: jax.Array, scales: jax.Array) -> jax.Array:
    """magnitude / 2^(scale - 127), from the bits of a float32 that may be subnormal."""
    as_float = jax.lax.bitcast_convert_type
    inverse = as_float((254 - jnp.minimum(scales, 253)) << 23, jnp.float32)
    # A subnormal is its bits * 2^-149: as an integer it is not flushed.
    small = magnitude.astype(jnp.int32).astype(jnp.float32) * 2.0**-23
    small *= as_float((128 - jnp.minimum(scales, 100)) << 23, jnp.float32)
    normal = as_float(magnitude, jnp.float32) * inverse
    return jnp.where(magnitude < 1 << 23, small, normal)
