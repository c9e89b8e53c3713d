"""What a model is: frozen dataclasses of plain numbers, validated when they are built.

No mesh, path or array lives here. `k3jax.config.hf` maps these to and from the released
`config.json`; `k3jax.config.presets` names the sizes.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

AttentionKind = Literal["kda", "mla"]
FeedForwardKind = Literal["dense", "moe"]

# Of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps a file states (SEMANTICS 3.1).
LATENT_NORM_EPS = 1e-6


def _require_positive(owner: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{owner}.{name}={value} must be positive")


def _require_not_negative(owner: str, **values: int) -> None:
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
        _require_positive(
            "kda", num_heads=self.num_heads, head_dim=self.head_dim, conv_size=self.conv_size
        )
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
        _require_positive(
            "mla",
            num_heads=self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        _require_not_negative("mla", qk_rope_head_dim=self.qk_rope_head_dim)

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
        _require_positive(
            "moe",
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_hidden_dim=self.expert_hidden_dim,
            latent_dim=self.latent_dim,
            num_expert_groups=self.num_expert_groups,
            topk_groups=self.topk_groups,
            layer_freq=self.layer_freq,
        )
        _require_not_negative(
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
    """The vision tower and its projector (SEMANTICS 6); queries may be wider than `dim`."""

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

    def __post_init__(self):
        object.__setattr__(self, "merge_size", tuple(self.merge_size))
        _require_positive(
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
        if self.projector_dim != self.dim:
            raise ValueError(
                f"vision.projector_dim={self.projector_dim} must equal the tower's dim={self.dim}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.qkv_dim // self.num_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What stands at one depth; equal kinds have equal parameter shapes."""

    attention: AttentionKind
    feed_forward: FeedForwardKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class K3Config:
    """A Kimi K3 or Kimi-Linear model. Layer numbers in the two lists are 1-based, as released."""

    model_type: Literal["kimi_k3", "kimi_linear"] = "kimi_k3"
    vocab_size: int
    dim: int
    num_layers: int
    ffn_dim: int  # hidden width of dense feed-forward layers
    kda_layers: tuple[int, ...]
    full_attention_layers: tuple[int, ...]
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig | None
    activation: Literal["situ", "silu"]
    situ_beta: float = 1.0
    situ_linear_beta: float | None = None
    attention_residual_block: int | None  # layers per block; None = ordinary residuals
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position: int = 1048576
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    media_placeholder_id: int | None = None  # the one token that an image's features replace
    vision: VisionConfig | None = None
    # The config.json that `from_hf` read, as JSON text: `to_hf` writes the framework's generic
    # keys back from it. It describes no computation, so it takes no part in == and hash.
    source_json: str = dataclasses.field(default="", repr=False, compare=False)

    def __post_init__(self):
        for name in ("kda_layers", "full_attention_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _require_positive(
            "config",
            vocab_size=self.vocab_size,
            dim=self.dim,
            num_layers=self.num_layers,
            ffn_dim=self.ffn_dim,
            attention_residual_block=self.attention_residual_block,
            situ_beta=self.situ_beta,
            situ_linear_beta=self.situ_linear_beta,
            norm_eps=self.norm_eps,
            max_position=self.max_position,
        )
        if self.model_type not in ("kimi_k3", "kimi_linear"):
            raise ValueError(f"model_type={self.model_type!r} must be 'kimi_k3' or 'kimi_linear'")
        if self.activation not in ("situ", "silu"):
            raise ValueError(f"activation={self.activation!r} must be 'situ' or 'silu'")
        sees = self.vision is not None or self.media_placeholder_id is not None
        if sees and self.model_type != "kimi_k3":
            raise ValueError(
                f"model_type={self.model_type!r} has no vision tower: vision and "
                f"media_placeholder_id must be None, or use 'kimi_k3'"
            )
        self._check_layers()
        for name in ("bos_id", "eos_id", "pad_id", "media_placeholder_id"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < self.vocab_size:
                raise ValueError(f"{name}={token} is outside vocab_size={self.vocab_size}")

    def _check_layers(self) -> None:
        listed = sorted(self.kda_layers + self.full_attention_layers)
        expected = range(1, self.num_layers + 1)
        if listed != list(expected):
            repeated = sorted({i for i in listed if listed.count(i) > 1})
            raise ValueError(
                f"kda_layers and full_attention_layers must partition 1..{self.num_layers}: "
                f"missing {sorted(set(expected) - set(listed))}, repeated {repeated}, "
                f"out of range {sorted(set(listed) - set(expected))}"
            )

    def layer_kind(self, index: int) -> LayerKind:
        """Kind of the layer with 0-based `index` (SEMANTICS 3.2)."""
        attention: AttentionKind = "kda" if index + 1 in self.kda_layers else "mla"
        is_moe = (
            self.moe is not None
            and index >= self.moe.first_dense_layers
            and index % self.moe.layer_freq == 0
        )
        return LayerKind(attention=attention, feed_forward="moe" if is_moe else "dense")

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(self.layer_kind(i) for i in range(self.num_layers))

    @property
    def num_moe_layers(self) -> int:
        return sum(kind.feed_forward == "moe" for kind in self.layer_kinds)

    @property
    def num_blocks(self) -> int:
        """Attention-residual bank entries after the last layer: ceil(L / block), 0 without."""
        if self.attention_residual_block is None:
            return 0
        return -(-self.num_layers // self.attention_residual_block)

    @classmethod
    def from_hf(cls, path: str | os.PathLike[str], *, allow_unknown: bool = False) -> "K3Config":
        """Read a released `config.json` (or its folder); see `k3jax.config.hf.read_config`."""
        from k3jax.config import hf

        return hf.read_config(path, allow_unknown=allow_unknown)

    @classmethod
    def from_hf_dict(
        cls, document: Mapping[str, Any], *, allow_unknown: bool = False
    ) -> "K3Config":
        """The model of a `config.json` already in memory; see `k3jax.config.hf.parse_config`."""
        from k3jax.config import hf

        return hf.parse_config(document, allow_unknown=allow_unknown)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this model as a dictionary; see `k3jax.config.hf_writer.to_hf`."""
        from k3jax.config import hf_writer

        return hf_writer.to_hf(self)

    @classmethod
    def kimi_k3(cls) -> "K3Config":
        """The released Kimi K3: 93 layers, 896 experts, 2.78T text parameters."""
        from k3jax.config import presets

        return presets.kimi_k3()

    @classmethod
    def kimi_linear_48b(cls) -> "K3Config":
        """The previous family: Kimi-Linear 48B-A3B."""
        from k3jax.config import presets

        return presets.kimi_linear_48b()

    @classmethod
    def small(cls) -> "K3Config":
        """A model that trains on one accelerator, every mechanism present."""
        from k3jax.config import presets

        return presets.small()

    @classmethod
    def tiny(cls) -> "K3Config":
        """A model that trains on two CPU cores in minutes, every mechanism present."""
        from k3jax.config import presets

        return presets.tiny()
