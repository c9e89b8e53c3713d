"""The definition of MXFP8: every number compared with every finite E4M3 number, in float64."""

import numpy as np

GROUP = 32


def values() -> np.ndarray:
    """[256]: the number of each E4M3 code; 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    )
    magnitude[code & 127 == 127] = np.nan
    return np.where(code & 128, -magnitude, magnitude)


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., K] of finite numbers -> codes uint8 [..., K] and scales uint8 [..., K/32]."""
    groups = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, GROUP)
    with np.errstate(divide="ignore"):
        exponents = np.clip(np.ceil(np.log2(np.abs(groups).max(-1) / 448)), -127, 127)
    scaled = groups / np.exp2(exponents)[..., None]
    magnitudes = values()[:127]
    distance = np.abs(np.abs(scaled)[..., None] - magnitudes)
    is_odd = np.arange(127) % 2  # of two nearest numbers the one with an even code
    order = np.lexsort((np.broadcast_to(is_odd, distance.shape), distance), axis=-1)
    codes = (order[..., 0] + 128 * np.signbit(scaled)).astype(np.uint8).reshape(x.shape)
    return codes, (exponents + 127).astype(np.uint8)


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Float64 numbers [..., K] of codes uint8 and scales uint8."""
    factors = np.exp2(np.asarray(scales, np.float64) - 127)
    factors[np.asarray(scales) == 255] = np.nan
    return values()[np.asarray(codes)] * np.repeat(factors, GROUP, axis=-1)
