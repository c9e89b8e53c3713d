"""Model configuration: dataclasses, the released `config.json`, and named sizes."""

from k3jax.config.architecture import (
    K3Config,
    KDAConfig,
    LayerKind,
    MLAConfig,
    MoEConfig,
    VisionConfig,
)
from k3jax.config.errors import ConfigError

__all__ = [
    "ConfigError",
    "K3Config",
    "KDAConfig",
    "LayerKind",
    "MLAConfig",
    "MoEConfig",
    "VisionConfig",
]
