"""Model FLOPs utilisation and goodput: how much of the machine and of the time a run used."""

import time

import jax

from k3jax.config import K3Config
from k3jax.plan import count_flops_per_token
from meshes.presets import CHIPS

# Beginning of what jax calls a device -> the chip's name in `meshes.presets`. The first that fits.
KINDS = (
    ("TPU v5 lite", "v5e"),
    ("TPU v5e", "v5e"),
    ("TPU v5", "v5p"),
    ("TPU v6", "v6e"),
    ("TPU7x", "tpu7x"),
    ("TPU v7", "tpu7x"),
    ("NVIDIA H100", "h100"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA B200", "b200"),
)


def peak_flops(kind: str) -> float | None:
    """Dense bfloat16 operations per second of a device, by its kind; None when it is unknown."""
    for beginning, name in KINDS:
        if kind.startswith(beginning):
            return CHIPS[name].peak_flops
    return None


class Speed:
    """Turns step times into utilisation and goodput.

    MFU counts the operations of the model, forward and backward, nothing recomputed, text tokens
    only (`k3jax.plan`), over what the devices could do. Goodput is the share of the time since
    this start of the run that went into steps that counted.

    Args:
        model: the model.
        batch: rows per step.
        length: tokens per row.
        num_devices: how many compute.
    """

    def __init__(self, model: K3Config, *, batch: int, length: int, num_devices: int):
        per_token = count_flops_per_token(model, length=length).training
        self.tokens = batch * length
        self.flops = per_token * self.tokens
        peak = peak_flops(jax.devices()[0].device_kind)
        self.peak = None if peak is None else peak * num_devices
        self._start = time.perf_counter()
        self._useful = 0.0

    def record(self, seconds: float, *, counted: bool) -> dict:
        """What metrics.jsonl says of one step.

        Args:
            seconds: its time.
            counted: whether it made an update.
        """
        self._useful += seconds * counted
        return {
            "step_seconds": round(seconds, 6),
            "tokens_per_second": self.tokens / seconds,
            "mfu": None if self.peak is None else self.flops / seconds / self.peak,
            "goodput": self._useful / (time.perf_counter() - self._start),
        }
