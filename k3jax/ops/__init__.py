"""Functions on sharded arrays: what modules call."""

from k3jax.ops.dense import dense, embed, whole_over_tensor
from k3jax.ops.elementwise import (
    gated_rms_norm,
    gelu,
    gelu_tanh,
    rms_norm,
    situ,
    swiglu,
)
from k3jax.ops.expert_load import ExchangeLoad
from k3jax.ops.experts import gather_scores, routed_experts, select_experts
from k3jax.ops.explain import explain_kernels
from k3jax.ops.kda import delta_attention, delta_attention_step, short_conv
from k3jax.ops.layout import balance_tokens, token_multiple, whole_tokens
from k3jax.ops.loss import cross_entropy
from k3jax.ops.mla import latent_attention, latent_attention_step
from k3jax.ops.parallel import DEFAULT_PARALLEL, Parallel
from k3jax.ops.residual import depth_mix, push_block
from k3jax.ops.vision import (
    FeaturePlaces,
    PatchPlaces,
    frame_embedding,
    grids_are_valid,
    item_attention,
    locate_features,
    locate_patches,
    merge_features,
    pool_frames,
    position_embedding,
    rotary_factors,
    rotate_pairs,
    spread_patches,
)
from pallas_kernels.kda import l2_normalize

__all__ = [
    "DEFAULT_PARALLEL",
    "ExchangeLoad",
    "FeaturePlaces",
    "Parallel",
    "PatchPlaces",
    "balance_tokens",
    "cross_entropy",
    "delta_attention",
    "delta_attention_step",
    "dense",
    "depth_mix",
    "embed",
    "explain_kernels",
    "frame_embedding",
    "gated_rms_norm",
    "gather_scores",
    "gelu",
    "gelu_tanh",
    "grids_are_valid",
    "item_attention",
    "l2_normalize",
    "latent_attention",
    "latent_attention_step",
    "locate_features",
    "locate_patches",
    "merge_features",
    "pool_frames",
    "position_embedding",
    "push_block",
    "rms_norm",
    "rotary_factors",
    "rotate_pairs",
    "routed_experts",
    "select_experts",
    "short_conv",
    "situ",
    "spread_patches",
    "swiglu",
    "token_multiple",
    "whole_over_tensor",
    "whole_tokens",
]
