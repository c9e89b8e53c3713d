"""Named sizes."""

from k3jax.config.architecture import K3Config, KDAConfig, MLAConfig, MoEConfig


def tiny() -> K3Config:
    """Nine layers (K K K M twice, then M), attention-residual blocks of four, so the last is partial."""
    full = (4, 8, 9)
    return K3Config(
        vocab_size=512,
        dim=128,
        num_layers=9,
        ffn_dim=384,
        kda_layers=tuple(i for i in range(1, 10) if i not in full),
        full_attention_layers=full,
        kda=KDAConfig(num_heads=2, head_dim=64, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=2,
            q_lora_rank=64,
            kv_lora_rank=32,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=16,
            experts_per_token=2,
            num_shared_experts=1,
            expert_hidden_dim=64,
            latent_dim=64,
            latent_norm=True,
            first_dense_layers=1,
        ),
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        attention_residual_block=4,
    )
