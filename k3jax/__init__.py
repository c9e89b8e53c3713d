"""Kimi K3 in JAX: the exact architecture, its kernels, training and inference.

    import jax, k3jax
    model = k3jax.init(k3jax.K3Config.tiny(), jax.random.key(0))
    logits = model(tokens)

Public names load on first use, so `import k3jax` is quick and imports no jax.
"""

import importlib

_PUBLIC = {
    "K3Config": "k3jax.config",
    "init": "k3jax.model",
    "next_token_loss": "k3jax.model",
    "trace": "k3jax.model",
    "pack_experts": "k3jax.model",
    "unpack_experts": "k3jax.model",
    "load_run": "k3jax.train.restore",
    "load_hf": "k3jax.checkpoint.hf",
    "save_hf": "k3jax.checkpoint.save",
    "Media": "k3jax.media",
    "MediaConfig": "k3jax.media",
    "Video": "k3jax.media",
    "process_media": "k3jax.media",
    "explain_kernels": "k3jax.ops",
    "prefill": "k3jax.infer",
    "decode_step": "k3jax.infer",
    "generate": "k3jax.infer",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'k3jax' has no attribute {name!r}; it offers {__all__}")


def __dir__():
    return __all__
