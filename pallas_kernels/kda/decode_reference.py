"""The definition of `kda_decode`: the definitions of its parts, one after the other."""

import jax.numpy as jnp

from pallas_kernels.kda.activate import activate
from pallas_kernels.kda.reference import kda_reference
from pallas_kernels.short_conv import reference as short_conv


def decode(tokens, state, *, gate, conv, beta_logits, normalize_qk, scale, every_state):
    """Compute what `pallas_kernels.kda_decode` says.

    Args:
        tokens: q, k [B, T, H, K], v [B, T, H, V], log_decay [B, T, H, K] and beta [B, T, H].
        state: [B, H, K, V] in the dtype of the computation.
        gate: as there, and so are the other options.
        conv: likewise.
        beta_logits: likewise.
        normalize_qk: likewise.
        scale: likewise, a number.
        every_state: likewise.

    Returns:
        (output [B, T, H, V], state, None or tails), the last two with T as second dimension where
        `every_state`.
    """
    q, k, v, log_decay, beta = tokens
    (num_rows, num_tokens), tails = q.shape[:2], None
    if conv is not None:
        by_length = [
            [
                short_conv.short_conv(x[:, :length], weight, None, tail)
                for x, weight, tail in zip((q, k, v), conv.weights, conv.tails, strict=True)
            ]
            for length in range(1, num_tokens + 1)
        ]
        q, k, v = (x for x, _ in by_length[-1])
        tails = tuple(tail for _, tail in by_length[-1])
        if every_state:
            tails = tuple(
                jnp.stack([of_length[n][1] for of_length in by_length], axis=1) for n in range(3)
            )
    q, k, log_decay, beta = activate(
        q, k, log_decay, beta, gate=gate, beta_logits=beta_logits, normalize_qk=normalize_qk
    )
    arrays = (x.astype(state.dtype) for x in (q, k, v, log_decay, beta))
    counts = jnp.broadcast_to(jnp.arange(1, num_tokens + 1), (num_rows, num_tokens))
    output, final, states = kda_reference(
        *arrays, scale=scale, initial_state=state[:, None], segment_ids=None, per_run=False,
        state_positions=counts if every_state else None,
    )  # fmt: skip
    return output, states if every_state else final[:, 0], tails
