"""Causal depthwise short convolution followed by silu, with packing and padding."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import require_floating, require_integer, require_rank, require_shape
from pallas_kernels.debug import check_segment_order
from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.short_conv import mosaic_gpu, mosaic_tpu, reference, xla

_FORMS = {
    "reference": reference.short_conv,
    "xla": xla.short_conv,
    "mosaic_tpu": mosaic_tpu.short_conv,
    "mosaic_gpu": mosaic_gpu.short_conv,
}


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return silu(conv(x)) and the inputs that a continuation needs.

    For the real tokens of one segment, numbered without the padding between them,

        output[t] = silu(sum_j weight[j] * x[t - (W - 1) + j]),   j = 0 .. W - 1,

    so the last tap multiplies the current token. Before its first token a segment sees zeros; the
    first segment of a row sees `initial_state`. Tokens with segment id 0 are as if absent, wherever
    they stand: their output is 0, no window holds them, and neither their values nor the gradient
    of their outputs is read. A segment is a run of equal ids among the real tokens.

    Args:
        x: inputs [B, T, H, K]; T at least 1, B = 0 with "xla" (and None). Kernels take float32 or
            bfloat16, "xla" and "reference" any float type.
        weight: taps [W, H, K], oldest first, W >= 2.
        segment_ids: int [B, T], or None when every token is real and of one segment.
        initial_state: raw inputs before the first real token [B, W-1, H, K], oldest first; None
            is zeros.
        implementation: None, "reference", "xla", "mosaic_tpu" or "mosaic_gpu".

    Returns:
        output [B, T, H, K] in x.dtype (float32 inside, one rounding at the end), and final_state
        [B, W-1, H, K] in x.dtype: the last W-1 real inputs of the last segment, oldest first. What
        a shorter segment lacks is zero, or the end of `initial_state` in a row's first segment; a
        row without real tokens returns its `initial_state`.

    Raises:
        ValueError: shapes disagree, there are no tokens, or the implementation is unknown.
        TypeError: x or weight is not floating point, or segment_ids is not integer.
        NotImplementedError: the named kernel does not take these arguments (K a multiple of 128,
            float32 or bfloat16, nothing empty) or this device.
    """
    require_rank("short_conv", "B T H K", x=x)
    require_rank("short_conv", "W H K", weight=weight)
    require_floating("short_conv", x=x, weight=weight)
    batch, length, heads, width = x.shape
    taps = weight.shape[0]
    if taps < 2:
        raise ValueError(f"short_conv: weight has {taps} tap; at least 2 are needed")
    if length < 1:
        raise ValueError(f"short_conv: x has shape {x.shape}; at least one token is needed")
    require_shape("short_conv", (taps, heads, width), "(H, K of x)", weight=weight)
    if segment_ids is not None:
        require_integer("short_conv", segment_ids=segment_ids)
        require_shape("short_conv", (batch, length), "(B, T of x)", segment_ids=segment_ids)
        check_segment_order("short_conv", segment_ids)
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
    if initial_state is not None:
        require_floating("short_conv", initial_state=initial_state)
        expected = (batch, taps - 1, heads, width)
        require_shape("short_conv", expected, "(B, W-1, H, K)", initial_state=initial_state)
        initial_state = initial_state.astype(x.dtype)
    limits = {
        "mosaic_tpu": lambda: mosaic_tpu.unsupported(x),
        "mosaic_gpu": lambda: mosaic_gpu.unsupported(x),
    }
    form = _FORMS[choose_implementation("short_conv", implementation, limits)]
    return form(x, weight, segment_ids, initial_state)
