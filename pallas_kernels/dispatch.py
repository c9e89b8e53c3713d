"""Which implementation of an op runs: one table, read before anything runs.

A name that the caller gives is used or refused, never replaced; `None` reads the table. Nothing
here looks at array values, so the choice is the same under `jit` and outside of it.
"""

import dataclasses
from collections.abc import Callable, Mapping

from pallas_kernels.device import Device, current_device
from pallas_kernels.interpret import interpreted_platform

# Every implementation a kernel folder may hold, fastest device last.
IMPLEMENTATIONS = ("reference", "xla", "mosaic_tpu", "mosaic_gpu")

# op -> implementations that exist.
BUILT = {
    "attention_residual": IMPLEMENTATIONS,
    "attention_residual_block": IMPLEMENTATIONS,
    "attention_residual_merge": IMPLEMENTATIONS,
    "cross_entropy": ("reference", "xla", "mosaic_tpu", "mosaic_gpu"),
    "grouped_apply": ("reference", "xla"),
    "grouped_glu": ("reference", "xla", "mosaic_tpu", "mosaic_gpu"),
    "grouped_matmul": ("reference", "xla", "mosaic_tpu", "mosaic_gpu"),
    "kda": ("reference", "xla", "mosaic_tpu", "mosaic_gpu"),
    "kda_decode": ("reference", "xla", "mosaic_tpu", "mosaic_gpu"),
    "mla_attention": ("reference", "xla", "mosaic_tpu", "mosaic_gpu"),
    "mla_decode": ("reference", "xla", "mosaic_tpu", "mosaic_gpu"),
    "mxfp4": ("reference", "xla"),
    "short_conv": IMPLEMENTATIONS,
}

# The implementations made for one platform.
_PLATFORM = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}


@dataclasses.dataclass(frozen=True)
class Choice:
    """One decision of `choose_implementation`.

    Attributes:
        op: name of the op.
        implementation: what runs.
        device: name of the device it is for.
        reason: why, in words.
    """

    op: str
    implementation: str
    device: str
    reason: str


_made: dict[Choice, None] = {}  # in order of their last appearance


def choices_made() -> tuple[Choice, ...]:
    """Return the different decisions taken in this process so far, oldest first."""
    return tuple(_made)


def choose_implementation(
    op: str,
    implementation: str | None,
    limits: Mapping[str, Callable[[], str | None]] | None = None,
) -> str:
    """Return the name of the implementation of `op` that runs.

    Args:
        op: public name of the op, a key of `BUILT`.
        implementation: a name of `IMPLEMENTATIONS`, or None: the kernel of the current device where
            it takes these arguments, else "xla".
        limits: implementation -> function that says why the arguments are not supported
            ("head_dim=96 is not a multiple of 64"), or returns None when they are.

    Raises:
        ValueError: the name is no implementation at all.
        NotImplementedError: the named implementation is not built, does not run on the current
            device, or does not support the arguments.
    """
    built, limits = BUILT[op], limits or {}
    if implementation is None:
        device = current_device()
        name, reason = _default(built, limits, device)
        _record(Choice(op, name, device.name, reason))
        return name
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation={implementation!r} is unknown; use None or one of "
            f"{', '.join(built)}"
        )
    if implementation not in built:
        raise NotImplementedError(
            f"{op}: implementation={implementation!r} is not built; use None or one of "
            f"{', '.join(built)}"
        )
    if implementation in _PLATFORM:
        problem = _device_problem(implementation)
        if problem is None and implementation in limits:
            problem = limits[implementation]()
        if problem is not None:
            raise NotImplementedError(f"{op}: implementation={implementation!r}: {problem}")
        _record(Choice(op, implementation, current_device().name, "asked for"))
    return implementation


def _record(choice: Choice) -> None:
    _made.pop(choice, None)
    _made[choice] = None


def _default(built, limits, device: Device) -> tuple[str, str]:
    """The implementation of the device's platform where it fits, and the reason."""
    for name, platform in _PLATFORM.items():
        if name in built and device.platform == platform:
            problem = _device_problem(name)
            if problem is None and name in limits:
                problem = limits[name]()
            return (name, f"kernel of {device.name}") if problem is None else ("xla", problem)
    return "xla", f"no kernel for {device.platform}"


def _device_problem(implementation: str) -> str | None:
    """Why the implementation cannot run where the traced program is to run."""
    platform, device = _PLATFORM[implementation], current_device()
    if interpreted_platform() == platform:
        return None
    if device.platform != platform:
        return (
            f"it runs on {platform}, and this program is for {device.kind}; use None, or look at "
            f"its numbers within pallas_kernels.interpreted({platform!r})"
        )
    if implementation == "mosaic_gpu" and device.generation != "hopper":
        return f"it is written for Hopper GPUs (H100, H200, H20), not for {device.kind}; use 'xla'"
    return None
