"""The definition of MXFP4: the formula in float64 for every (scale byte, code), and a plain search.

Both are independent of the fast forms: decoding looks each weight up in a table of 256 x 16
numbers, and quantising compares every weight with every representable value.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

GROUP = 32
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@functools.cache
def decode_table(dtype: str) -> np.ndarray:
    """[256, 16]: value of each scale byte and code, rounded to `dtype`."""
    scales = np.exp2(np.arange(256, dtype=np.float64) - 127)
    scales[255] = np.nan
    table = scales[:, None] * np.concatenate([MAGNITUDES, -MAGNITUDES])
    with np.errstate(over="ignore"):  # beyond the largest finite number lies infinity
        return table.astype(jnp.dtype(dtype))


def dequantize(codes: jax.Array, scales: jax.Array, dtype) -> jax.Array:
    """[..., out, in/2] and [..., out, in/32] -> [..., in, out] in `dtype`."""
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    table = jnp.asarray(decode_table(jnp.dtype(dtype).name))
    weights = table[jnp.repeat(scales, GROUP, axis=-1), nibbles]
    return jnp.swapaxes(weights, -1, -2)


def quantize(weights: np.ndarray, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """[..., in, out] -> codes and scales, by exhaustive comparison in float64 numpy."""
    rows = np.swapaxes(np.asarray(weights, np.float64), -1, -2)
    groups = rows.reshape(*rows.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(-1)
    with np.errstate(divide="ignore"):
        exponents = _exponents(largest, rule)
    exponents = np.clip(exponents, -127, 125)  # 6 * 2^125 is finite, 6 * 2^126 is not
    scaled = groups / np.exp2(exponents)[..., None]
    distance = np.abs(np.abs(scaled)[..., None] - MAGNITUDES)
    # Of two nearest values the one with an even index; the pairs below never tie three ways.
    is_odd = np.arange(8) % 2
    order = np.lexsort((np.broadcast_to(is_odd, distance.shape), distance), axis=-1)
    nibbles = (order[..., 0] + 8 * np.signbit(scaled)).astype(np.uint8).reshape(rows.shape)
    scales = (exponents + 127).astype(np.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, scales


def _exponents(largest: np.ndarray, rule: str) -> np.ndarray:
    power = np.floor(np.log2(largest))
    if rule == "floor":
        return power - 2
    if rule == "ceil":
        return np.ceil(np.log2(largest / 6))
    if rule == "even":
        return power - 2 + (largest >= 1.75 * np.exp2(power))
    raise ValueError(rule)
