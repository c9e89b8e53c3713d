"""Running the TPU and GPU kernels on a CPU, to look at their numbers."""

import contextlib
import contextvars

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

_active: contextvars.ContextVar[str | None] = contextvars.ContextVar("interpreted", default=None)

MODES = ("tpu", "tpu_poisoned", "tpu_races", "gpu", "gpu_races")


@contextlib.contextmanager
def interpreted(mode: str):
    """Interpret kernels on the CPU inside this context.

    Args:
        mode: "tpu" computes values only (the fastest); "tpu_poisoned" also fills scratch memory and
            outputs with NaN first and refuses reads out of bounds; "tpu_races" runs the grid on two
            cores and looks for unsynchronised accesses; "gpu" simulates shared memory and barriers
            of `mosaic_gpu` kernels; "gpu_races" also looks for races.

    Raises:
        ValueError: the mode is unknown.
    """
    if mode == "tpu":
        force = pltpu.force_tpu_interpret_mode(True)
    elif mode == "tpu_poisoned":
        force = pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())
    elif mode == "tpu_races":
        races = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
        force = pltpu.force_tpu_interpret_mode(races)
    elif mode in ("gpu", "gpu_races"):
        force = _force_gpu(detect_races=mode == "gpu_races")
    else:
        raise ValueError(f"interpreted: mode={mode!r} is unknown; use one of {', '.join(MODES)}")
    token = _active.set(mode)
    try:
        with force:
            yield
    finally:
        _active.reset(token)


def interpreted_platform() -> str | None:
    """Return "tpu" or "gpu" inside `interpreted`, else None."""
    mode = _active.get()
    return None if mode is None else mode.split("_")[0]


@contextlib.contextmanager
def _force_gpu(detect_races: bool):
    """The switch of jax; public from 0.12 on."""
    if hasattr(plgpu, "force_gpu_interpret_mode"):
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
            yield
        return
    from jax._src.pallas.mosaic_gpu.interpret import params

    from pallas_kernels.interpret_wgmma import transposed_operands

    parameters = params.InterpretGPUParams(detect_races=detect_races)
    with transposed_operands(), params.force_gpu_interpret_mode(parameters):
        yield
