"""The mixture over depth of Block Attention Residuals."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention_residual import mosaic_gpu, mosaic_tpu, reference, xla
from pallas_kernels.attention_residual.rows import check_eps, checked_count, checked_most
from pallas_kernels.attention_residual.two_phase import (
    DepthPartial,
    attention_residual_block,
    attention_residual_merge,
)
from pallas_kernels.checks import require_floating, require_rank, require_shape
from pallas_kernels.dispatch import choose_implementation

__all__ = [
    "DepthPartial",
    "attention_residual",
    "attention_residual_block",
    "attention_residual_merge",
]

_KERNELS = {
    "mosaic_tpu": mosaic_tpu.attention_residual,
    "mosaic_gpu": mosaic_gpu.attention_residual,
}


def attention_residual(
    bank: jax.Array,
    current: jax.Array,
    query: jax.Array,
    count: int | jax.Array,
    *,
    eps: float,
    most: int | None = None,
    return_bank: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Mix the blocks of a bank and the current sum, token by token, by a softmax over depth.

    With rows V = (bank[0], .., bank[count-1], current) of one token,

        score_j = sum_d query_d V_jd / sqrt(mean(V_j^2) + eps),
        mixed = sum_j softmax(score)_j V_j         (the rows as they are, not normalised).

    Bank entries from `count` on do not exist: they are not read into any result (they may hold
    NaN), their probability is 0 and their gradient is 0.

    Args:
        bank: blocks [N, B, T, D], N >= 0; B and T may be 0 with "xla" (and None). Kernels take
            float32 or bfloat16, "xla" and "reference" any float type.
        current: running sum of the present block [B, T, D].
        query: norm weight times projection weight [D].
        count: number of entries that exist, an int (entries past it cost nothing) or int32 []. A
            traced count outside 0..most gives NaN, and is reported in `debug_checks`.
        eps: added to the mean square, positive.
        most: static; largest value that count can have here. None is N.
        return_bank: also return the bank. Later readers that take it from there hand their sum of
            its gradients to this call, whose kernels add theirs in place: no array of the size of
            the bank is made and no entry touched that does not exist.
        implementation: None, "reference", "xla", "mosaic_tpu" or "mosaic_gpu".

    Returns:
        mixed [B, T, D] in current.dtype (float32 inside, one rounding at the end), and the
        probabilities [B, T, N+1] float32: bank entries 0 .. N-1, then the current sum. With
        `return_bank` also the bank as it is.

    Raises:
        ValueError: shapes disagree, count or most is out of range, count is larger than most, eps
            is not positive, or the implementation is unknown.
        TypeError: an array is not floating point, or count or most is not an integer.
        NotImplementedError: the named kernel does not take these arguments (D a multiple of 128,
            at most 31 entries, both float32 or both bfloat16, no empty rows) or this device.
    """
    require_rank("attention_residual", "B T D", current=current)
    require_rank("attention_residual", "N B T D", bank=bank)
    require_floating("attention_residual", bank=bank, current=current, query=query)
    require_shape(
        "attention_residual", (bank.shape[0], *current.shape), "(N, shape of current)", bank=bank
    )
    require_shape("attention_residual", current.shape[-1:], "(D of current)", query=query)
    check_eps("attention_residual", eps)
    most = checked_most("attention_residual", most, bank.shape[0])
    count, factor = checked_count("attention_residual", count, bank.shape[0], most)
    if not isinstance(count, int):
        query = query * factor.astype(query.dtype)
        if most == 0:  # forms return the current sum without a look at the query
            current = jnp.where(jnp.isnan(factor), jnp.nan, current).astype(current.dtype)
    limits = {
        "mosaic_tpu": lambda: mosaic_tpu.unsupported(bank, current),
        "mosaic_gpu": lambda: mosaic_gpu.unsupported(bank, current),
    }
    name = choose_implementation("attention_residual", implementation, limits)
    if name == "reference":
        results = reference.attention_residual(bank, current, query, count, eps)
    elif name == "xla":
        results = xla.attention_residual(bank, current, query, count, most, eps)
    else:
        return _KERNELS[name](bank, current, query, count, most, eps, return_bank)
    return (*results, bank) if return_bank else results
