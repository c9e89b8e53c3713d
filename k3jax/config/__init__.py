"""Model configuration: dataclasses, the released `config.json`, and named sizes."""

from k3jax.config.architecture import K3Config, LayerKind
from k3jax.config.errors import ConfigError
from k3jax.config.parts import KDAConfig, MLAConfig, MoEConfig, VisionConfig

__all__ = [
    "ConfigError",
    "K3Config",
    "KDAConfig",
    "LayerKind",
    "MLAConfig",
    "MoEConfig",
    "VisionConfig",
]
