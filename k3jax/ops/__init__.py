"""Functions on sharded arrays: what modules call."""

from k3jax.ops.dense import dense, embed
from k3jax.ops.elementwise import gated_rms_norm, l2_normalize, rms_norm, situ, swiglu
from k3jax.ops.experts import gather_scores, routed_experts, select_experts
from k3jax.ops.kda import delta_attention, delta_attention_step, short_conv
from k3jax.ops.mla import latent_attention, latent_attention_step
from k3jax.ops.residual import depth_mix

__all__ = [
    "delta_attention",
    "delta_attention_step",
    "dense",
    "depth_mix",
    "embed",
    "gated_rms_norm",
    "gather_scores",
    "l2_normalize",
    "latent_attention",
    "latent_attention_step",
    "rms_norm",
    "routed_experts",
    "select_experts",
    "short_conv",
    "situ",
    "swiglu",
]
