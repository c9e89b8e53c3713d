"""Model configuration: dataclasses, the released `config.json`, and named sizes."""

from k3jax.config.architecture import K3Config, KDAConfig, LayerKind, MLAConfig, MoEConfig

__all__ = ["K3Config", "KDAConfig", "LayerKind", "MLAConfig", "MoEConfig"]
