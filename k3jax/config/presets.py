"""Named sizes."""

from collections.abc import Callable

from k3jax.config.architecture import K3Config
from k3jax.config.parts import KDAConfig, MLAConfig, MoEConfig, VisionConfig

# Reserved ids of the released vocabulary of 163,840.
_RELEASED_TOKENS = {"bos_id": 163584, "eos_id": 163586, "pad_id": 163839}
# The same of the byte vocabulary, 256 bytes and then the 256 control ids in the released order.
_BYTE_TOKENS = {"bos_id": 256, "eos_id": 258, "pad_id": 511, "media_placeholder_id": 277}


def _others(num_layers: int, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """The 1-based layers that are not `chosen`."""
    return tuple(i for i in range(1, num_layers + 1) if i not in chosen)


def kimi_k3() -> K3Config:
    """Kimi K3 as released: 2.78T text parameters, 105B active, and the vision tower.

    69 KDA and 24 MLA layers, (K K K M) 23 times and a last M; residual blocks of 12.
    """
    full = (*range(4, 93, 4), 93)
    return K3Config(
        vocab_size=163840,
        dim=7168,
        num_layers=93,
        ffn_dim=33792,
        kda_layers=_others(93, full),
        full_attention_layers=full,
        kda=KDAConfig(num_heads=96, head_dim=128, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=96,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=896,
            experts_per_token=16,
            num_shared_experts=2,
            expert_hidden_dim=3072,
            latent_dim=3584,
            latent_norm=True,
            first_dense_layers=1,
        ),
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        attention_residual_block=12,
        media_placeholder_id=163605,
        vision=VisionConfig(
            dim=1024,
            num_layers=27,
            num_heads=12,
            qkv_dim=1536,
            ffn_dim=4096,
            patch_size=14,
            merge_size=(2, 2),
            position_rows=64,
            position_columns=64,
            max_frames=4,
            projector_dim=1024,
            projector_norm_eps=1e-5,
        ),
        **_RELEASED_TOKENS,
    )


def kimi_linear_48b() -> K3Config:
    """Kimi-Linear 48B-A3B: plain residuals and experts, unbounded gate, one query projection."""
    full = (4, 8, 12, 16, 20, 24, 27)
    return K3Config(
        model_type="kimi_linear",
        vocab_size=163840,
        dim=2304,
        num_layers=27,
        ffn_dim=9216,
        kda_layers=_others(27, full),
        full_attention_layers=full,
        kda=KDAConfig(num_heads=32, head_dim=128, gate_lower_bound=None, full_rank_gate=False),
        mla=MLAConfig(
            num_heads=32,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            output_gate=False,
        ),
        moe=MoEConfig(
            num_experts=256,
            experts_per_token=8,
            num_shared_experts=1,
            expert_hidden_dim=1024,
            latent_dim=None,
            latent_norm=False,
            routed_scaling_factor=2.446,
            first_dense_layers=1,
        ),
        activation="silu",
        attention_residual_block=None,
        **_RELEASED_TOKENS,
    )


def small() -> K3Config:
    """0.9B parameters, 0.25B active: trains on one accelerator, every mechanism present.

    (K K K M) four times and a last M, residual blocks of six, so the last is partial; heads are
    128 wide and the vocabulary is that of `tiny`, so both train on the same text.
    """
    full = (4, 8, 12, 16, 17)
    return K3Config(
        vocab_size=512,
        dim=1024,
        num_layers=17,
        ffn_dim=4096,
        kda_layers=_others(17, full),
        full_attention_layers=full,
        kda=KDAConfig(num_heads=8, head_dim=128, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=8,
            q_lora_rank=384,
            kv_lora_rank=256,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=64,
            experts_per_token=8,
            num_shared_experts=2,
            expert_hidden_dim=512,
            latent_dim=512,
            latent_norm=True,
            first_dense_layers=1,
        ),
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        attention_residual_block=6,
        vision=VisionConfig(
            dim=512,
            num_layers=8,
            num_heads=8,
            qkv_dim=768,
            ffn_dim=2048,
            patch_size=14,
            merge_size=(2, 2),
            position_rows=32,
            position_columns=32,
            max_frames=4,
            projector_dim=512,
            projector_norm_eps=1e-5,
        ),
        **_BYTE_TOKENS,
    )


def tiny() -> K3Config:
    """Nine layers (K K K M twice, then M); residual blocks of four, so the last is partial."""
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
        vision=VisionConfig(
            dim=64,
            num_layers=2,
            num_heads=2,
            qkv_dim=96,
            ffn_dim=128,
            patch_size=14,
            merge_size=(2, 2),
            position_rows=16,
            position_columns=16,
            max_frames=4,
            projector_dim=64,
            projector_norm_eps=1e-5,
        ),
        **_BYTE_TOKENS,
    )


# Name on the command line -> its function.
PRESETS: dict[str, Callable[[], K3Config]] = {
    preset.__name__: preset for preset in (kimi_k3, kimi_linear_48b, small, tiny)
}
