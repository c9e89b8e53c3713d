"""Weight matrices in MXFP4: 4-bit floats in groups of 32 with one power-of-two scale each.

    weight[i, o] = value(code[o, i]) * 2^(scale[o, i // 32] - 127)

`code` is a sign bit (8) and an index into 0, 0.5, 1, 1.5, 2, 3, 4, 6 (E2M1); two codes share a
byte, the even input column in the low half. `scale` is a biased exponent (E8M0); 255 is NaN.
Source: OCP Microscaling Formats (MX) Specification 1.0; the byte order is that of the released
checkpoint (format "mxfp4-pack-quantized").
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.checks import require_float_type, require_floating
from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.mxfp4 import reference, xla

GROUP = xla.GROUP
Rule = Literal["floor", "ceil", "even"]
RULES = tuple(xla.CARRY)

_DEQUANTIZE = {
    "reference": functools.partial(jax.jit, static_argnames="dtype")(reference.dequantize),
    "xla": functools.partial(jax.jit, static_argnames="dtype")(xla.dequantize),
}
_quantize = functools.partial(jax.jit, static_argnames="rule")(xla.quantize)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP4:
    """A stack of matrices [..., in, out], stored transposed in 4.25 bits per weight.

    Attributes:
        codes: uint8 [..., out, in/2]: column 2j in the low half of byte j, 2j+1 in the high half.
        scales: uint8 [..., out, in/32].
    """

    codes: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., in, out], the shape of the matrices that this stands for."""
        *leading, out, half = self.codes.shape
        return (*leading, 2 * half, out)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    def check(self, name: str = "MXFP4") -> None:
        """Refuse arrays that are not codes and scales of one another.

        Raises:
            TypeError: not uint8.
            ValueError: the shapes do not fit, or the input width is no multiple of 32.
        """
        for part in ("codes", "scales"):
            array = getattr(self, part)
            if array.dtype != jnp.uint8:
                raise TypeError(f"{name}: {part} has dtype {array.dtype}; packed bytes are uint8")
        if self.codes.ndim < 2 or self.codes.shape[-1] % (GROUP // 2):
            raise ValueError(
                f"{name}: codes {tuple(self.codes.shape)} must be [..., out, in/2] with in a "
                f"multiple of {GROUP}"
            )
        expected = (*self.codes.shape[:-1], 2 * self.codes.shape[-1] // GROUP)
        if tuple(self.scales.shape) != expected:
            raise ValueError(
                f"{name}: scales {tuple(self.scales.shape)} must be {expected}, one per {GROUP} "
                f"input columns of codes {tuple(self.codes.shape)}"
            )

    def dequantize(self, dtype=jnp.bfloat16, *, implementation: str | None = None) -> jax.Array:
        """The matrices [..., in, out].

        Exact in bfloat16 and float32, subnormal numbers included; magnitudes past the largest
        finite number are infinite, and all weights of a group with scale byte 255 are NaN.

        Raises:
            TypeError: dtype is not a float type, or the codes are not bytes.
            ValueError: codes and scales do not fit, or the implementation is unknown.
        """
        self.check()
        require_float_type("MXFP4", dtype=dtype)
        form = _DEQUANTIZE[choose_implementation("mxfp4", implementation)]
        return form(self.codes, self.scales, dtype=jnp.dtype(dtype))

    @classmethod
    def quantize(cls, weights: jax.Array, *, rule: Rule = "even") -> "MXFP4":
        """Nearest codes (ties to the even code, saturating at 6) under a rule for the scales.

        With a the largest magnitude of a group, its exponent is

            floor   floor(log2 a) - 2                     may saturate, a / scale < 8
            ceil    ceil(log2(a / 6))                     never saturates
            even    floor's, plus 1 if a >= 1.75 * 2^floor(log2 a)          a / scale < 7

        Quantising dequantised weights returns their values under each rule; floor and even also
        return the scale that they chose. Magnitudes above 6 * 2^125 saturate there, the largest
        that decodes to a finite number. A group that holds a NaN or an infinity gets byte 255.

        Args:
            weights: [..., in, out], in a multiple of 32; narrower types than float32 are exact.
            rule: "floor", "ceil" or "even".

        Raises:
            ValueError: unknown rule, `in` is no multiple of 32, or weights are empty.
            TypeError: weights are not floating point.
        """
        if rule not in RULES:
            raise ValueError(f"MXFP4: rule={rule!r} must be one of {', '.join(RULES)}")
        require_floating("MXFP4", weights=weights)
        if weights.ndim < 2 or weights.shape[-2] % GROUP or 0 in weights.shape:
            raise ValueError(
                f"MXFP4: weights {tuple(weights.shape)} must be [..., in, out], not empty, with in "
                f"a multiple of {GROUP}, the group that shares a scale"
            )
        return cls(*_quantize(weights, rule))
