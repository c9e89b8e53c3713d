"""Kernels of the model as plain functions of arrays: each with a definition and fast forms.

Every operation is a per-device function with an `implementation=` keyword: `"reference"` is the
definition, `"xla"` the fast form in `jax.numpy`; `None` chooses from a table before anything runs.
The package needs jax and numpy only.
"""

import importlib

# Loaded here, not on first use: importing the folder of this name would otherwise hide the function.
from pallas_kernels.kda import kda, kda_decode, kda_gate

# Public name -> module below this package, imported on first use.
_MODULES = {
    "attention_residual": "attention_residual",
    "grouped_matmul": "grouped_matmul",
    "mla_attention": "mla",
    "short_conv": "short_conv",
}

__all__ = sorted([*_MODULES, "kda", "kda_decode", "kda_gate"])


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
