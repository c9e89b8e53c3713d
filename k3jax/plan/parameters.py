"""Number of parameters by part, in closed form, from the released shapes."""

import dataclasses

from k3jax.config import K3Config, KDAConfig, MLAConfig, VisionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartCount:
    """Numbers of one part: all there is, and what one token reads."""

    total: int
    active: int

    def __add__(self, other: "PartCount") -> "PartCount":
        return PartCount(total=self.total + other.total, active=self.active + other.active)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Parameters of a model by part; the sums of the text parts are `text`.

    `active` counts what one token reads: everything but the routed experts it was not sent to,
    the whole embedding table included (`text_without_embedding` leaves it out).
    """

    parts: dict[str, PartCount]
    vision: int

    @property
    def text(self) -> PartCount:
        """The language model with its embedding, head and balancing biases."""
        return sum(self.parts.values(), PartCount(total=0, active=0))

    @property
    def text_without_embedding(self) -> PartCount:
        """`text` less the embedding table, of which a token reads a single row."""
        embedding = self.parts["embedding"]
        return self.text + PartCount(total=-embedding.total, active=-embedding.active)

    @property
    def total(self) -> int:
        """Text and vision together."""
        return self.text.total + self.vision


def count_parameters(cfg: K3Config) -> ParameterCounts:
    """Count the parameters of `cfg`, one decay scalar per KDA head.

    The balancing biases of the routers are included (part "router"): they are saved with the
    model though no gradient trains them.
    """
    kinds = cfg.layer_kinds
    num_kda = sum(kind.attention == "kda" for kind in kinds)
    num_moe = cfg.num_moe_layers
    parts = {
        "embedding": _all_active(cfg.vocab_size * cfg.dim),
        "KDA attention": _all_active(num_kda * _kda(cfg.dim, cfg.kda)),
        "MLA attention": _all_active((cfg.num_layers - num_kda) * _mla(cfg.dim, cfg.mla)),
        "dense feed-forward": _all_active((cfg.num_layers - num_moe) * 3 * cfg.dim * cfg.ffn_dim),
    }
    if cfg.moe is not None:
        moe = cfg.moe
        expert = 3 * (moe.latent_dim or cfg.dim) * moe.expert_hidden_dim
        latent = 0
        if moe.latent_dim is not None:
            latent = 2 * cfg.dim * moe.latent_dim + moe.latent_dim * moe.latent_norm
        shared = 3 * cfg.dim * moe.num_shared_experts * moe.expert_hidden_dim
        parts |= {
            "router": _all_active(num_moe * moe.num_experts * (cfg.dim + 1)),
            "routed experts": PartCount(
                total=num_moe * moe.num_experts * expert,
                active=num_moe * moe.experts_per_token * expert,
            ),
            "latent projections": _all_active(num_moe * latent),
            "shared experts": _all_active(num_moe * shared),
        }
    # input and post-attention norm of each layer, and the final one
    parts["layer norms"] = _all_active((2 * cfg.num_layers + 1) * cfg.dim)
    if cfg.attention_residual_block is not None:
        # norm and projection: two mixtures per layer and one before the final norm
        parts["attention residuals"] = _all_active((2 * cfg.num_layers + 1) * 2 * cfg.dim)
    parts["output head"] = _all_active(cfg.vocab_size * cfg.dim)
    vision = _vision(cfg.vision, cfg.dim) if cfg.vision is not None else 0
    return ParameterCounts(parts=parts, vision=vision)


def _all_active(count: int) -> PartCount:
    return PartCount(total=count, active=count)


def _kda(dim: int, kda: KDAConfig) -> int:
    """One KDA mixer with its own norm; `inner` is H * K."""
    inner = kda.num_heads * kda.head_dim
    low_rank = dim * kda.head_dim + kda.head_dim * inner
    qkv = 3 * (dim * inner + inner * kda.conv_size)
    decay = low_rank + inner + kda.num_heads  # projections, dt_bias, A_log
    beta = dim * kda.num_heads
    gate = dim * inner if kda.full_rank_gate else low_rank
    output = kda.head_dim + inner * dim  # o_norm, o_proj
    return qkv + decay + beta + gate + output


def _mla(dim: int, mla: MLAConfig) -> int:
    """One MLA mixer with its latent norms."""
    query_dim = mla.num_heads * mla.qk_head_dim
    value_dim = mla.num_heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        query = dim * query_dim
    else:
        query = dim * mla.q_lora_rank + mla.q_lora_rank + mla.q_lora_rank * query_dim
    latent = dim * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
    expand = mla.kv_lora_rank * mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    gate = dim * value_dim if mla.output_gate else 0
    return query + latent + expand + gate + value_dim * dim


def _vision(vision: VisionConfig, text_dim: int) -> int:
    """Tower and projector."""
    patches = 3 * vision.patch_size**2 * vision.dim
    positions = vision.position_rows * vision.position_columns * vision.dim
    block = 2 * vision.dim + 4 * vision.dim * vision.qkv_dim + 2 * vision.dim * vision.ffn_dim
    merged = vision.merge_size[0] * vision.merge_size[1] * vision.projector_dim
    projector = merged * merged + merged * text_dim + text_dim
    return patches + positions + vision.num_layers * block + vision.dim + projector
