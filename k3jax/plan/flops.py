"""Floating-point operations per token, in closed form, with the assumptions written down."""

import dataclasses

from k3jax.config import K3Config
from k3jax.plan.parameters import count_parameters

# Backward computes two products of the forward's size for each of its products; what is
# recomputed (remat) comes on top and depends on the policy.
TRAINING_FACTOR = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """Operations per token of a forward pass over `length` tokens, a multiply-add counted as 2.

    Attributes:
        length: tokens of the sequence; only `attention` depends on it.
        projections: 2 per active matrix parameter: projections, experts, router, head.
        attention: MLA scores and values, each query seeing (length + 1) / 2 keys on average,
            keys and values expanded per head: (T + 1)/2 * H * 2 * (K + V).
        recurrence: KDA state in its token-by-token form: decay, read, write, output, that is
            7 * K * V per head; the chunked form does more operations in larger products.
        other: short convolutions, 2 per tap and channel, and attention-residual mixtures,
            6 * D per row mixed. Norms, activations and the softmax are left out.
    """

    length: int
    projections: int
    attention: int
    recurrence: int
    other: int

    @property
    def forward(self) -> int:
        """All of it."""
        return self.projections + self.attention + self.recurrence + self.other

    @property
    def training(self) -> int:
        """Forward and backward, nothing recomputed: 3 * forward."""
        return TRAINING_FACTOR * self.forward


def count_flops_per_token(cfg: K3Config, *, length: int) -> FlopsPerToken:
    """Operations per text token of a causal forward pass over `length` tokens.

    Raises:
        ValueError: `length` is not positive.
    """
    if length <= 0:
        raise ValueError(f"length={length} must be positive")
    num_mla = len(cfg.full_attention_layers)
    num_kda = len(cfg.kda_layers)
    mla, kda = cfg.mla, cfg.kda
    inner = kda.num_heads * kda.head_dim
    per_key = 2 * mla.num_heads * (mla.qk_head_dim + mla.v_head_dim)
    return FlopsPerToken(
        length=length,
        projections=2 * _active_matrix_parameters(cfg),
        attention=num_mla * per_key * (length + 1) // 2,
        recurrence=num_kda * 7 * inner * kda.head_dim,
        other=num_kda * 3 * inner * 2 * kda.conv_size + 6 * cfg.dim * _num_mixed_rows(cfg),
    )


def _active_matrix_parameters(cfg: K3Config) -> int:
    """Active parameters that multiply a vector once per token: all but tables, norms and taps."""
    parts = count_parameters(cfg).parts
    apart = ("embedding", "layer norms", "attention residuals")
    active = sum(count.active for name, count in parts.items() if name not in apart)
    kda, mla = cfg.kda, cfg.mla
    inner = kda.num_heads * kda.head_dim
    kda_vectors = 3 * inner * kda.conv_size + inner + kda.num_heads + kda.head_dim
    mla_vectors = mla.kv_lora_rank + (mla.q_lora_rank or 0)
    active -= len(cfg.kda_layers) * kda_vectors + len(cfg.full_attention_layers) * mla_vectors
    if cfg.moe is not None:
        latent_norm = (cfg.moe.latent_dim or 0) * cfg.moe.latent_norm
        active -= cfg.num_moe_layers * (cfg.moe.num_experts + latent_norm)
    return active


def _num_mixed_rows(cfg: K3Config) -> int:
    """Rows that enter the attention-residual mixtures of one token."""
    block = cfg.attention_residual_block
    if block is None:
        return 0
    rows = cfg.num_blocks + 1  # the mixture before the final norm
    for layer in range(cfg.num_layers):
        before = -(-layer // block)  # entries when the layer's attention mixture is formed
        rows += before + 1 if before else 0
        rows += layer // block + 2  # its feed-forward mixture
    return rows
