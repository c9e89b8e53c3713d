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
    most: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mix of the first `count` bank entries and `current`; see `pallas_kernels.attention_residual`.

    Returns:
        mixed [B, T, D] in current's dtype; the probabilities [B, T, N + 1] float32, bank entries
        first (zero for those that do not exist), `current` last; and the bank, to be read from
        there on, so that its gradients are added up in place.
    """
    batch, tokens, _ = meshes.spec_of(current)
    row, entries = P(batch, tokens, None), P(None, batch, tokens, None)

    def run(bank, current, query, *traced):
        return pallas_kernels.attention_residual(
            bank, current, query, *(traced or [count]), eps=eps, most=most, return_bank=True
        )

    # A known count stays known inside: kernels then visit only what exists.
    traced = () if isinstance(count, int) else (jax.numpy.asarray(count, jax.numpy.int32),)
    if not meshes.has_mesh():
        return run(bank, current, query, *traced)
    specs = (entries, row, P(None), *[P()] * len(traced))
    return meshes.per_device(run, specs, (row, row, entries))(bank, current, query, *traced)


def push_block(
    bank: jax.Array,  # [N, B, T, D]
    block: jax.Array,  # [B, T, D]
    slot: jax.Array,  # [] int32
    is_new: jax.Array,  # [] bool
) -> jax.Array:
    """The bank with `block` at `slot` if `is_new`; a slot past the end stays unwritten then.

    Args:
        bank: finished blocks.
        block: the one that may have been finished.
        slot: its place, at most N; N only where it is not new.
        is_new: whether it has been finished.
    """
    batch, tokens, _ = meshes.spec_of(block)
    row, entries = P(batch, tokens, None), P(None, batch, tokens, None)

    def run(bank, block, slot, is_new):
        slot = jax.numpy.minimum(slot, bank.shape[0] - 1)
        entry = jax.numpy.where(is_new, block, bank[slot])
        return jax.lax.dynamic_update_index_in_dim(bank, entry, slot, 0)

    return meshes.per_device(run, (entries, row, P(), P()), entries)(bank, block, slot, is_new)
