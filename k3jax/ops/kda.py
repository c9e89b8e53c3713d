"""KDA on activations: short convolution, gate and delta rule, each device on its own rows."""

import jax
from jax.sharding import PartitionSpec as P

import meshes
import pallas_kernels
from k3jax.ops import recurrence
from k3jax.ops.layout import cutting


def short_conv(
    x: jax.Array,  # [B, T, H, K]
    weight: jax.Array,  # [W, H, K]
    *,
    segment_ids: jax.Array | None = None,  # [B, T]
    initial_state: jax.Array | None = None,  # [B, W-1, H, K]
) -> tuple[jax.Array, jax.Array]:
    """Silu of the causal depthwise convolution; see `pallas_kernels.short_conv`.

    Tokens may be cut over mesh axes; the final state is whole on all of them.
    """
    batch, tokens, heads, _ = meshes.spec_of(x)
    cut = cutting(tokens)
    row, state = P(batch, tokens, heads, None), P(batch, None, heads, None)

    def run(x, weight, segment_ids, initial_state):
        if cut:
            return recurrence.short_conv(x, weight, segment_ids, initial_state, cut)
        return pallas_kernels.short_conv(
            x, weight, segment_ids=segment_ids, initial_state=initial_state
        )

    specs = (
        row,
        P(None, heads, None),
        None if segment_ids is None else P(batch, tokens),
        None if initial_state is None else state,
    )
    return meshes.per_device(run, specs, (row, state))(x, weight, segment_ids, initial_state)


def delta_attention(
    q: jax.Array,  # [B, T, H, K] after convolution
    k: jax.Array,  # [B, T, H, K]
    v: jax.Array,  # [B, T, H, V]
    decay_logits: jax.Array,  # [B, T, H, K]
    beta_logits: jax.Array,  # [B, T, H]
    A_log: jax.Array,  # [H]
    dt_bias: jax.Array,  # [H, K]
    *,
    lower_bound: float | None,
    initial_state: jax.Array | None = None,  # [B, H, K, V] float32
    segment_ids: jax.Array | None = None,  # [B, T]
) -> tuple[jax.Array, jax.Array]:
    """L2-normalise q and k, activate gate and beta, run the delta rule.

    Tokens may be cut over mesh axes (`k3jax.ops.recurrence`); the final state is whole on them.

    Returns:
        output [B, T, H, V] in v's dtype, and the final state [B, H, K, V] float32.
    """
    batch, tokens, heads, _ = meshes.spec_of(q)
    cut = cutting(tokens)
    row, per_head = P(batch, tokens, heads, None), P(batch, tokens, heads)
    state = P(batch, heads, None, None)

    def run(q, k, v, decay_logits, beta_logits, A_log, dt_bias, initial_state, segment_ids):
        if cut:
            operands = (q, k, v, decay_logits, beta_logits, A_log, dt_bias)
            return recurrence.delta_rule(
                operands, initial_state, segment_ids, lower_bound=lower_bound, axes=cut
            )
        return pallas_kernels.kda(
            q, k, v, decay_logits, beta_logits,
            gate=pallas_kernels.KDAGate(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound),
            beta_logits=True, normalize_qk=True,
            initial_state=initial_state, segment_ids=segment_ids,
        )  # fmt: skip

    specs = (
        *(row, row, row, row, per_head, P(heads), P(heads, None)),
        None if initial_state is None else state,
        None if segment_ids is None else P(batch, tokens),
    )
    return meshes.per_device(run, specs, (row, state))(
        q, k, v, decay_logits, beta_logits, A_log, dt_bias, initial_state, segment_ids
    )


def delta_attention_step(
    q: jax.Array,  # [B, 1, H, K]
    k: jax.Array,  # [B, 1, H, K]
    v: jax.Array,  # [B, 1, H, V]
    decay_logits: jax.Array,  # [B, 1, H, K]
    beta_logits: jax.Array,  # [B, 1, H]
    A_log: jax.Array,  # [H]
    dt_bias: jax.Array,  # [H, K]
    state: jax.Array,  # [B, H, K, V] float32
    *,
    lower_bound: float | None,
) -> tuple[jax.Array, jax.Array]:
    """One token of `delta_attention` from a state; q and k stay in float32 as released."""
    batch, _, heads, _ = meshes.spec_of(q)
    row, per_head = P(batch, None, heads, None), P(batch, None, heads)
    state_spec = P(batch, heads, None, None)

    def run(q, k, v, decay_logits, beta_logits, A_log, dt_bias, state):
        return pallas_kernels.kda_decode(
            q, k, v, decay_logits, beta_logits, state,
            gate=pallas_kernels.KDAGate(A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound),
            beta_logits=True, normalize_qk=True,
        )  # fmt: skip

    specs = (row, row, row, row, per_head, P(heads), P(heads, None), state_spec)
    return meshes.per_device(run, specs, (row, state_spec))(
        q, k, v, decay_logits, beta_logits, A_log, dt_bias, state
    )
