"""The parts of a model: attention of both kinds, experts, vision tower.

Frozen dataclasses of plain numbers, validated when they are built.
"""

import dataclasses
from typing import ClassVar, Literal

# Of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps a file states.
LATENT_NORM_EPS = 1e-6
# Of the tower's norms, which no file states: float32 machine epsilon, for bfloat16 as well.
TOWER_NORM_EPS = 1.1920929e-07


def require_positive(owner: str, **values: int | None) -> None:
    """Raise a ValueError that names the first value of `owner` that is not above 0."""
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{owner}.{name}={value} must be positive")


def require_not_negative(owner: str, **values: int) -> None:
    """Raise a ValueError that names the first value of `owner` that is below 0."""
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{owner}.{name}={value} must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention: `num_heads` heads with keys and values of width `head_dim`."""

    num_heads: int
    head_dim: int
    conv_size: int = 4
    # None selects the unbounded gate -exp(A_log) * softplus(s); a number b < 0 the bounded
    # gate b * sigmoid(exp(A_log) * s). It is a property of the weights, never a default.
    gate_lower_bound: float | None
    full_rank_gate: bool

    def __post_init__(self):
        require_positive(
            "kda", num_heads=self.num_heads, head_dim=self.head_dim, conv_size=self.conv_size
        )
        if self.conv_size < 2:
            raise ValueError(f"kda.conv_size={self.conv_size} must be at least 2 taps")
        if self.gate_lower_bound is not None and not self.gate_lower_bound < 0:
            raise ValueError(f"kda.gate_lower_bound={self.gate_lower_bound} must be below 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention without rotary embedding (NoPE)."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool
    latent_norm_eps: float = LATENT_NORM_EPS

    def __post_init__(self):
        require_positive(
            "mla",
            num_heads=self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        require_not_negative("mla", qk_rope_head_dim=self.qk_rope_head_dim)

    @property
    def qk_head_dim(self) -> int:
        """Key width per head; the attention scale is its inverse square root."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed and shared experts; `latent_dim=None` lets routed experts read the full width."""

    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    expert_hidden_dim: int
    latent_dim: int | None
    latent_norm: bool
    router_activation: Literal["sigmoid", "softmax"] = "sigmoid"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_groups: int = 1
    topk_groups: int = 1
    first_dense_layers: int = 0
    layer_freq: int = 1

    def __post_init__(self):
        require_positive(
            "moe",
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_hidden_dim=self.expert_hidden_dim,
            latent_dim=self.latent_dim,
            num_expert_groups=self.num_expert_groups,
            topk_groups=self.topk_groups,
            layer_freq=self.layer_freq,
        )
        require_not_negative(
            "moe",
            num_shared_experts=self.num_shared_experts,
            first_dense_layers=self.first_dense_layers,
        )
        if self.experts_per_token >= self.num_experts:
            raise ValueError(
                f"moe.experts_per_token={self.experts_per_token} must be below "
                f"num_experts={self.num_experts} (balancing needs the next best score)"
            )
        if self.num_experts % self.num_expert_groups:
            raise ValueError(
                f"moe.num_experts={self.num_experts} is not divisible by "
                f"num_expert_groups={self.num_expert_groups}"
            )
        if self.topk_groups > self.num_expert_groups:
            raise ValueError(
                f"moe.topk_groups={self.topk_groups} exceeds "
                f"num_expert_groups={self.num_expert_groups}"
            )
        experts_per_group = self.num_experts // self.num_expert_groups
        # A group's score is the sum of its two largest biased scores.
        if self.uses_groups and experts_per_group < 2:
            raise ValueError(
                f"moe.num_expert_groups={self.num_expert_groups} leaves {experts_per_group} of "
                f"num_experts={self.num_experts} per group; group selection needs at least 2"
            )
        if self.topk_groups * experts_per_group < self.experts_per_token:
            raise ValueError(
                f"moe.topk_groups={self.topk_groups} groups of {experts_per_group} experts hold "
                f"fewer than experts_per_token={self.experts_per_token}"
            )
        if self.router_activation not in ("sigmoid", "softmax"):
            raise ValueError(
                f"moe.router_activation={self.router_activation!r} must be 'sigmoid' or 'softmax'"
            )

    @property
    def uses_groups(self) -> bool:
        """Group selection applies only when it can exclude a group."""
        return self.num_expert_groups > 1 and self.topk_groups < self.num_expert_groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and its projector; queries may be wider than `dim`."""

    dim: int
    num_layers: int
    num_heads: int
    qkv_dim: int  # num_heads * head_dim
    ffn_dim: int
    patch_size: int
    merge_size: tuple[int, int]  # neighbouring patches (rows, columns) joined into one token
    # Learned position grid, resampled to each picture, and the frames one item may hold.
    position_rows: int
    position_columns: int
    max_frames: int
    projector_dim: int  # width per patch entering the projector
    projector_norm_eps: float
    norm_eps: ClassVar[float] = TOWER_NORM_EPS

    def __post_init__(self):
        object.__setattr__(self, "merge_size", tuple(self.merge_size))
        require_positive(
            "vision",
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            qkv_dim=self.qkv_dim,
            ffn_dim=self.ffn_dim,
            patch_size=self.patch_size,
            position_rows=self.position_rows,
            position_columns=self.position_columns,
            max_frames=self.max_frames,
            projector_dim=self.projector_dim,
        )
        if self.merge_size != (2, 2):
            raise ValueError(f"vision.merge_size={self.merge_size} must be (2, 2)")
        if self.qkv_dim % self.num_heads or self.head_dim % 4:
            raise ValueError(
                f"vision.qkv_dim={self.qkv_dim} must be num_heads={self.num_heads} heads whose "
                f"width is a multiple of 4 (rotary pairs for rows and columns)"
            )
        if self.dim % 2:
            raise ValueError(f"vision.dim={self.dim} must be even (sine and cosine of a frame)")
        if self.projector_dim != self.dim:
            raise ValueError(
                f"vision.projector_dim={self.projector_dim} must equal the tower's dim={self.dim}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.qkv_dim // self.num_heads
