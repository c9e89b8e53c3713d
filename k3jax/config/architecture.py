"""What a model is: a frozen dataclass of plain numbers and parts, validated when it is built.

No mesh, path or array lives here. `k3jax.config.hf` reads it from the released `config.json`,
`k3jax.config.hf_writer` writes it, `k3jax.config.presets` names the sizes.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

from k3jax.config.parts import KDAConfig, MLAConfig, MoEConfig, VisionConfig, require_positive

AttentionKind = Literal["kda", "mla"]
FeedForwardKind = Literal["dense", "moe"]


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
        require_positive(
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
        """Kind of the layer with 0-based `index`."""
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
