"""The config.json of a checkpoint: the model, and how its tensors are stored."""

import copy
from typing import Any

import numpy as np

from k3jax.checkpoint.check import quantization_config
from k3jax.config import K3Config
from pallas_kernels.mxfp4 import GROUP

# What loaders of packed experts read. `ignore` names what stays in bfloat16.
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def stored_config(cfg: K3Config, *, packed: bool, dtype: np.dtype) -> dict[str, Any]:
    """The document for tensors of this form.

    Args:
        cfg: the model; keys of the file it was read from are kept.
        packed: routed experts are MXFP4.
        dtype: type of the embedding and of most others.
    """
    document = cfg.to_hf()
    text = document.get("text_config", document)
    known = quantization_config(cfg)
    for section in (document, text):
        if isinstance(section.get("quantization_config"), dict):
            del section["quantization_config"]
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = dtype.name
    if not any(key in document for key in ("dtype", "torch_dtype")):
        document["dtype"] = dtype.name
    if packed:
        text["quantization_config"] = copy.deepcopy(known or QUANTIZATION)
    return document
