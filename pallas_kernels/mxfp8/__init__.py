"""Activations in MXFP8: 8-bit floats in groups of 32 with one power-of-two scale each.

    x[m, k] = value(code[m, k]) * 2^(scale[m, k // 32] - 127)

`code` is E4M3 (largest finite number 448, no infinities, 0x7f and 0xff are NaN); `scale` is a
biased exponent (E8M0), 255 is NaN. Source: OCP Microscaling Formats (MX) Specification 1.0.
The released model quantises its expert weights only, so this is an option of ours for products
with them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.checks import require_floating

GROUP = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP8:
    """Rows [..., K] in 8.25 bits per number; a constant to `jax.grad`.

    Attributes:
        codes: uint8 [..., K], the bits of `float8_e4m3fn` numbers.
        scales: uint8 [..., K/32].
    """

    codes: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    def check(self, name: str = "MXFP8") -> None:
        """Refuse arrays that are not codes and scales of one another.

        Raises:
            TypeError: not uint8.
            ValueError: the shapes do not fit, or the width is no multiple of 32.
        """
        for part in ("codes", "scales"):
            array = getattr(self, part)
            if array.dtype != jnp.uint8:
                raise TypeError(f"{name}: {part} has dtype {array.dtype}; packed bytes are uint8")
        expected = (*self.codes.shape[:-1], -(-self.codes.shape[-1] // GROUP))
        if self.codes.shape[-1] % GROUP or tuple(self.scales.shape) != expected:
            raise ValueError(
                f"{name}: codes {self.shape} must have a width that is a multiple of {GROUP}, and "
                f"scales {tuple(self.scales.shape)} must be {expected}"
            )

    def dequantize(self, dtype=jnp.bfloat16) -> jax.Array:
        """The numbers [..., K]; exact in float32 and bfloat16 while they are normal numbers."""
        self.check()
        numbers = jax.lax.bitcast_convert_type(self.codes, jnp.float8_e4m3fn).astype(jnp.float32)
        factors = jnp.repeat(exponent_factor(self.scales), GROUP, axis=-1)
        return (numbers * factors).astype(dtype)


def exponent_factor(scales: jax.Array) -> jax.Array:
    """2^(scale - 127) as float32 by bits; byte 0 is flushed to zero, 255 is NaN."""
    scales = scales.astype(jnp.int32)
    bits = jnp.where(scales == 255, 0x7FC00000, scales << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def quantize_mxfp8(x: jax.Array) -> MXFP8:
    """Nearest codes (ties to even) under the smallest scale that saturates nothing.

        scale exponent = ceil(log2(max|x| / 448))     over each group of 32 numbers

    E4M3 has an exponent of its own, so that a scale that is too large by less than two costs no
    precision but at the subnormal end. A group that holds a NaN or an infinity gets scale 255.

    Args:
        x: [..., K] with K a multiple of 32, without rows, too; computed in float32.

    Raises:
        TypeError: x is not floating point.
        ValueError: K is not a multiple of 32.
    """
    require_floating("quantize_mxfp8", x=x)
    if x.ndim < 1 or x.shape[-1] % GROUP:
        raise ValueError(
            f"quantize_mxfp8: x {tuple(x.shape)} must be [..., K] with K a multiple of {GROUP}, "
            "the group that shares a scale"
        )
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    largest = jax.lax.bitcast_convert_type(jnp.abs(groups).max(-1), jnp.int32)
    # 448 is 1.75 * 2^8: the exponent field less 8, plus one where the mantissa exceeds 1.75.
    exponents = ((largest + 0x1FFFFF) >> 23) - 8
    scales = jnp.clip(exponents, 1, 254)  # 2^-127 would be subnormal
    # 2^-e in two factors: for the smallest exponent e it would not be a finite number in one.
    half = (scales - 127) // 2
    powers = (jax.lax.bitcast_convert_type((127 - e) << 23, jnp.float32)
              for e in (half, scales - 127 - half))  # fmt: skip
    for power in powers:
        groups = groups * power[..., None]
    is_finite = largest < 0x7F800000
    codes = jnp.where(is_finite[..., None], groups, 0).astype(jnp.float8_e4m3fn)
    return MXFP8(
        jax.lax.bitcast_convert_type(codes, jnp.uint8).reshape(x.shape),
        jnp.where(is_finite, scales, 255).astype(jnp.uint8),
    )
