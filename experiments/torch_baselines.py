"""KDA of flash-linear-attention (Triton) and of FlashKDA (CUTLASS), timed where installed.

Both are PyTorch packages for CUDA: `pip install flash-linear-attention`, and FlashKDA from its
repository. Without a GPU, or without them, there is nothing to time and nothing is said.
"""

import functools
import importlib.util
import os
import statistics
import time
from collections.abc import Callable

import jax

from experiments.kernel_cases import KernelCase
from pallas_kernels.device import current_device

# flash-linear-attention would hand its own call over to FlashKDA.
os.environ.setdefault("FLA_FLASH_KDA", "0")
os.environ.setdefault("FLA_FLASH_KDA_TRAIN", "0")


def calls_for(case: KernelCase, inputs: tuple) -> dict[str, Callable[[], object]]:
    """Return name -> call of the installed packages that compute the case's function.

    Only KDA with activated gates has counterparts: inputs (q, k, v, log_decay, beta, ...).
    """
    if current_device().platform != "gpu" or case.op != "kda" or case.size != "k3":
        return {}
    if any(importlib.util.find_spec(name) is None for name in ("torch", "fla")):
        return {}
    import torch

    arrays = [torch.from_dlpack(x) for x in inputs[:5]]
    if arrays[0].dtype != torch.bfloat16 or "raw" in case.name:
        return {}
    if case.name.startswith("forward+backward"):
        return {"flash-linear-attention": functools.partial(_fla_gradient, arrays)}
    calls = {"flash-linear-attention": functools.partial(_fla_forward, arrays)}
    if importlib.util.find_spec("flash_kda") is not None:
        calls["FlashKDA"] = _flash_kda_forward(arrays)
    return calls


def time_calls(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call, with the GPU's own events, interleaved."""
    if not calls:
        return {}
    import torch

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):  # Triton tunes itself in the first calls
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                call()
            torch.cuda.synchronize()
            if number >= 3:
                seconds[name].append((time.perf_counter() - start) / 10)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _fla_forward(arrays):
    import torch
    from fla.ops.kda import chunk_kda

    with torch.no_grad():
        return chunk_kda(*arrays, output_final_state=True)


def _fla_gradient(arrays):
    from fla.ops.kda import chunk_kda

    leaves = [x.detach().requires_grad_(True) for x in arrays]
    output, _ = chunk_kda(*leaves, output_final_state=True)
    output.sum().backward()
    return [leaf.grad for leaf in leaves]


def _flash_kda_forward(arrays):
    """FlashKDA takes raw gates only: the same shapes and work, other values."""
    import flash_kda
    import torch

    q, k, v, log_decay, beta = arrays
    heads, width = q.shape[2:]
    out = torch.zeros_like(v)
    options = {
        "A_log": torch.zeros(heads, device=q.device),
        "dt_bias": torch.zeros(heads, width, device=q.device),
        "lower_bound": -5.0,
    }
    gate, beta = log_decay.to(torch.bfloat16), beta.to(torch.bfloat16)
    return lambda: flash_kda.fwd(q, k, v, gate, beta, width**-0.5, out, **options)


def describe_versions() -> dict[str, str]:
    """Return the versions of the packages that are installed, for the record."""
    versions = {"jax": jax.__version__}
    for name in ("torch", "fla", "flash_kda"):
        if importlib.util.find_spec(name) is not None:
            module = importlib.import_module(name)
            versions[name] = str(getattr(module, "__version__", "unknown"))
    return versions
