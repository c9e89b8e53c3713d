"""Block Attention Residuals: the mixture over depth, token by token."""

import jax
from jax.sharding import PartitionSpec as P

import meshes
import pallas_kernels


def depth_mix(
    bank: jax.Array,  # [N, B, T, D]
    current: jax.Array,  # [B, T, D]
    query: jax.Array,  # [D] float32, norm weight times projection
    count: int | jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Mix of the first `count` bank entries and `current`; see `pallas_kernels.attention_residual`.

    Returns:
        mixed [B, T, D] in current's dtype, and the probabilities [B, T, N + 1] float32, bank
        entries first (zero for those that do not exist), `current` last.
    """
    batch, tokens, _ = meshes.spec_of(current)
    row = P(batch, tokens, None)

    def run(bank, current, query, count):
        return pallas_kernels.attention_residual(bank, current, query, count, eps=eps)

    if not meshes.has_mesh():
        return run(bank, current, query, count)
    specs = (P(None, batch, tokens, None), row, P(None), P())
    return meshes.per_device(run, specs, (row, row))(
        bank, current, query, jax.numpy.asarray(count, jax.numpy.int32)
    )
