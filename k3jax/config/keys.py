"""Every key of a `config.json`: what it means, whether it may be missing, what is passed through.

Three kinds of keys exist, one set per section of the file:

* architecture keys (`Key`): read into a field of `K3Config`, or checked against the only values
  the model implements. The family `kimi_k3` requires all of them but those marked `OPTIONAL`;
  `kimi_linear` may omit those with a meaning for absence (`absent`).
* generic keys (`GENERIC`): the framework's bookkeeping. They do not change what the model
  computes; they are kept and written back.
* anything else is unknown, which is an error unless the caller allows it.
"""

import dataclasses
from typing import Any, Literal

REQUIRED = object()  # no meaning when absent: an error in both families
OMITTED = object()  # absence says nothing new: another key, or the check, already fixes the value

Kind = Literal["integer", "number", "boolean", "string", "integers"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One architecture key.

    Attributes:
        name: key in the file.
        field: dotted path in `K3Config`; None for a key that is only checked. Two keys may name
            one field: then their values must agree.
        kind: JSON type of the value.
        absent: value the field takes when `kimi_linear` omits the key; `REQUIRED` or `OMITTED`.
        optional: `kimi_k3` may omit it as well.
        nullable: null is a value of its own (None in the field).
        only: the values that are implemented; None for any.
    """

    name: str
    field: str | None
    kind: Kind
    absent: Any = REQUIRED
    optional: bool = False
    nullable: bool = False
    only: tuple[Any, ...] | None = None


def _token(name: str, field: str) -> Key:
    return Key(name=name, field=field, kind="integer", absent=OMITTED, optional=True, nullable=True)


def _fixed(name: str, kind: Kind, *values: Any, absent: Any = OMITTED) -> Key:
    return Key(name=name, field=None, kind=kind, absent=absent, only=values)


TOP_KEYS: tuple[Key, ...] = (
    _token("bos_token_id", "bos_id"),
    _token("eos_token_id", "eos_id"),
    _token("pad_token_id", "pad_id"),
    _token("media_placeholder_token_id", "media_placeholder_id"),
    dataclasses.replace(_fixed("tie_word_embeddings", "boolean", False), optional=True),
)

TEXT_KEYS: tuple[Key, ...] = (
    Key(name="vocab_size", field="vocab_size", kind="integer"),
    Key(name="hidden_size", field="dim", kind="integer"),
    Key(name="intermediate_size", field="ffn_dim", kind="integer"),
    Key(name="num_hidden_layers", field="num_layers", kind="integer"),
    Key(name="rms_norm_eps", field="norm_eps", kind="number"),
    Key(name="hidden_act", field="activation", kind="string", only=("situ", "silu")),
    Key(name="activation_situ_beta", field="situ_beta", kind="number", absent=1.0),
    Key(
        name="activation_situ_linear_beta",
        field="situ_linear_beta",
        kind="number",
        absent=None,
        nullable=True,
    ),
    Key(
        name="attn_res_block_size",
        field="attention_residual_block",
        kind="integer",
        absent=None,
        nullable=True,
    ),
    # MLA
    Key(name="num_attention_heads", field="mla.num_heads", kind="integer"),
    Key(name="num_key_value_heads", field="mla.num_heads", kind="integer", absent=OMITTED),
    Key(name="q_lora_rank", field="mla.q_lora_rank", kind="integer", absent=None, nullable=True),
    Key(name="kv_lora_rank", field="mla.kv_lora_rank", kind="integer"),
    Key(name="qk_nope_head_dim", field="mla.qk_nope_head_dim", kind="integer"),
    Key(name="qk_rope_head_dim", field="mla.qk_rope_head_dim", kind="integer"),
    Key(name="v_head_dim", field="mla.v_head_dim", kind="integer"),
    _fixed("mla_use_nope", "boolean", True, absent=REQUIRED),
    Key(name="mla_use_output_gate", field="mla.output_gate", kind="boolean", absent=False),
    # Mixture of experts. `num_experts` null or absent makes every layer dense; the keys below
    # it then say nothing and may be missing.
    Key(name="num_experts", field="moe.num_experts", kind="integer", absent=None, nullable=True),
    Key(name="num_experts_per_token", field="moe.experts_per_token", kind="integer"),
    Key(name="num_shared_experts", field="moe.num_shared_experts", kind="integer"),
    Key(name="moe_intermediate_size", field="moe.expert_hidden_dim", kind="integer"),
    Key(
        name="routed_expert_hidden_size",
        field="moe.latent_dim",
        kind="integer",
        absent=None,
        nullable=True,
    ),
    Key(name="latent_moe_use_norm", field="moe.latent_norm", kind="boolean", absent=False),
    Key(
        name="moe_router_activation_func",
        field="moe.router_activation",
        kind="string",
        only=("sigmoid", "softmax"),
    ),
    Key(name="moe_renormalize", field="moe.renormalize", kind="boolean"),
    Key(name="routed_scaling_factor", field="moe.routed_scaling_factor", kind="number"),
    Key(name="num_expert_group", field="moe.num_expert_groups", kind="integer"),
    Key(name="topk_group", field="moe.topk_groups", kind="integer"),
    Key(name="first_k_dense_replace", field="moe.first_dense_layers", kind="integer"),
    Key(name="moe_layer_freq", field="moe.layer_freq", kind="integer"),
    _fixed("topk_method", "string", "noaux_tc"),
    Key(name="use_grouped_topk", field=None, kind="boolean", absent=OMITTED),
    # Multi-token prediction layers would be read from the checkpoint: none are implemented.
    _fixed("num_nextn_predict_layers", "integer", 0),
    _fixed("tie_word_embeddings", "boolean", False),
    # Recipe and limits
    Key(name="initializer_range", field="initializer_range", kind="number", absent=0.02),
    Key(name="max_position_embeddings", field="max_position", kind="integer", absent=1048576),
    _token("bos_token_id", "bos_id"),
    _token("eos_token_id", "eos_id"),
    _token("pad_token_id", "pad_id"),
)

# The length limit under the name that the released Kimi-Linear files use.
KIMI_LINEAR_KEYS: tuple[Key, ...] = (
    Key(name="model_max_length", field="max_position", kind="integer", absent=OMITTED),
)

LINEAR_ATTENTION_KEYS: tuple[Key, ...] = (
    Key(name="full_attn_layers", field="full_attention_layers", kind="integers"),
    Key(name="kda_layers", field="kda_layers", kind="integers"),
    Key(name="num_heads", field="kda.num_heads", kind="integer"),
    Key(name="head_dim", field="kda.head_dim", kind="integer"),
    Key(name="short_conv_kernel_size", field="kda.conv_size", kind="integer"),
    Key(name="use_full_rank_gate", field="kda.full_rank_gate", kind="boolean", absent=False),
    # Absent in either family selects the unbounded gate; there is no default number.
    Key(
        name="gate_lower_bound",
        field="kda.gate_lower_bound",
        kind="number",
        absent=None,
        optional=True,
        nullable=True,
    ),
)

VISION_KEYS: tuple[Key, ...] = (
    Key(name="vt_hidden_size", field="vision.dim", kind="integer"),
    Key(name="vt_num_hidden_layers", field="vision.num_layers", kind="integer"),
    Key(name="vt_num_attention_heads", field="vision.num_heads", kind="integer"),
    Key(name="qkv_hidden_size", field="vision.qkv_dim", kind="integer"),
    Key(name="vt_intermediate_size", field="vision.ffn_dim", kind="integer"),
    Key(name="patch_size", field="vision.patch_size", kind="integer"),
    Key(name="merge_kernel_size", field="vision.merge_size", kind="integers"),
    Key(name="init_pos_emb_height", field="vision.position_rows", kind="integer"),
    Key(name="init_pos_emb_width", field="vision.position_columns", kind="integer"),
    Key(name="init_pos_emb_time", field="vision.max_frames", kind="integer"),
    Key(name="mm_hidden_size", field="vision.projector_dim", kind="integer"),
    Key(name="projector_ln_eps", field="vision.projector_norm_eps", kind="number"),
    Key(name="text_hidden_size", field="dim", kind="integer"),
    _fixed("activation_func", "string", "gelu_pytorch_tanh", absent=REQUIRED),
    _fixed("attn_bias", "boolean", False, absent=REQUIRED),
    _fixed("linear_bias", "boolean", False, absent=REQUIRED),
    _fixed("merge_type", "string", "sd2_tpool", absent=REQUIRED),
    _fixed("mlp_type", "string", "mlp2", absent=REQUIRED),
    _fixed("mm_projector_type", "string", "patchmergerv2", absent=REQUIRED),
    _fixed("norm_type", "string", "rmsnorm", absent=REQUIRED),
    _fixed("patch_embed_proj_bias", "boolean", False, absent=REQUIRED),
    _fixed("pos_emb_interpolation_mode", "string", "bilinear", absent=REQUIRED),
    _fixed("pos_emb_type", "string", "divided_fixed", absent=REQUIRED),
    _fixed("projector_hidden_act", "string", "gelu", absent=REQUIRED),
)

# Bookkeeping of the file format: class names, storage type, quantisation of the stored tensors
# (read by the checkpoint loader, which knows its format), labels.
_FILE = """
    _attn_implementation _name_or_path architectures auto_map chunk_size_feed_forward dtype
    finetuning_task id2label ignore_index image_placeholder is_decoder is_encoder_decoder
    label2id output_attentions output_hidden_states prefix problem_type pruned_heads
    quantization_config remove_invalid_values return_dict sep_token_id task_specific_params
    tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype torchscript
    transformers_version use_bfloat16 use_cache add_cross_attention cross_attention_hidden_size
    decoder_start_token_id
"""
# Sampling defaults that the framework once stored here.
_GENERATION = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_scores repetition_penalty return_dict_in_generate
    suppress_tokens temperature top_k top_p typical_p
"""
# Written by Kimi-Linear's configuration class but read by nothing: positions do not rotate
# (`mla_use_nope`) and every head width has a key of its own.
_UNUSED = "head_dim rope_parameters rope_scaling rope_theta"

GENERIC: frozenset[str] = frozenset((_FILE + _GENERATION).split())
KIMI_LINEAR_GENERIC: frozenset[str] = GENERIC | frozenset(_UNUSED.split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One object of the file: its path from the top, its keys, and the objects it holds."""

    path: tuple[str, ...]
    keys: tuple[Key, ...]
    structure: frozenset[str] = frozenset()
    generic: frozenset[str] = GENERIC

    @property
    def known(self) -> frozenset[str]:
        """Every name that may stand here."""
        return self.generic | self.structure | {key.name for key in self.keys}

    def label(self, name: str) -> str:
        """Dotted name of a key of this section."""
        return ".".join((*self.path, name))


VISION_PATH = ("vision_config",)

LAYOUT: dict[str, tuple[Section, ...]] = {
    "kimi_k3": (
        Section(
            path=(),
            keys=TOP_KEYS,
            structure=frozenset({"model_type", "text_config", "vision_config"}),
        ),
        Section(
            path=("text_config",),
            keys=TEXT_KEYS,
            structure=frozenset({"model_type", "linear_attn_config"}),
        ),
        Section(path=("text_config", "linear_attn_config"), keys=LINEAR_ATTENTION_KEYS),
        Section(path=VISION_PATH, keys=VISION_KEYS),
    ),
    "kimi_linear": (
        Section(
            path=(),
            keys=TEXT_KEYS + KIMI_LINEAR_KEYS,
            structure=frozenset({"model_type", "linear_attn_config"}),
            generic=KIMI_LINEAR_GENERIC,
        ),
        Section(path=("linear_attn_config",), keys=LINEAR_ATTENTION_KEYS),
    ),
}


def is_required(key: Key, family: str) -> bool:
    """Whether `family` must state `key` (expert keys only when there are experts)."""
    if key.optional:
        return False
    return family == "kimi_k3" or key.absent is REQUIRED
