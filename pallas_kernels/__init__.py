"""Kernels of the model as plain functions of arrays: each with a definition and fast forms.

Every operation is a per-device function with an `implementation=` keyword: `"reference"` is the
definition, `"xla"` the fast form in `jax.numpy`, `"mosaic_tpu"` and `"mosaic_gpu"` the Pallas
kernels; `None` chooses from a table before anything runs. The package needs jax and numpy only.

The folder of an op bears the name of its function. All folders are loaded here, so that
`pallas_kernels.short_conv` is the function from the first import on; reach the modules with
`from pallas_kernels.short_conv import xla`.
"""

from pallas_kernels.attention_residual import (
    DepthPartial,
    attention_residual,
    attention_residual_block,
    attention_residual_merge,
)
from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.debug import debug_checks
from pallas_kernels.dispatch import Choice, choices_made
from pallas_kernels.grouped_matmul import (
    SituGLU,
    SwiGLU,
    grouped_apply,
    grouped_glu,
    grouped_matmul,
)
from pallas_kernels.interpret import interpreted
from pallas_kernels.kda import (
    KDAConv,
    KDAGate,
    compose_transitions,
    kda,
    kda_decode,
    kda_gate,
    kda_transition,
    plan_context,
)
from pallas_kernels.mla import mla_attention, mla_decode
from pallas_kernels.mxfp4 import MXFP4
from pallas_kernels.mxfp8 import MXFP8, quantize_mxfp8
from pallas_kernels.short_conv import short_conv

__all__ = [
    "MXFP4",
    "MXFP8",
    "Choice",
    "DepthPartial",
    "KDAConv",
    "KDAGate",
    "SituGLU",
    "SwiGLU",
    "attention_residual",
    "attention_residual_block",
    "attention_residual_merge",
    "choices_made",
    "compose_transitions",
    "cross_entropy",
    "debug_checks",
    "grouped_apply",
    "grouped_glu",
    "grouped_matmul",
    "interpreted",
    "kda",
    "kda_decode",
    "kda_gate",
    "kda_transition",
    "mla_attention",
    "mla_decode",
    "plan_context",
    "quantize_mxfp8",
    "short_conv",
]
