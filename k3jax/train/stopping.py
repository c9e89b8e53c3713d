"""The ways a run ends before its last step."""

import signal


class Interrupted(Exception):
    """SIGTERM or SIGINT arrived; the state was saved."""

    def __init__(self, signum: int, step: int, resume: str):
        self.exit_code = 128 + signum
        name = signal.Signals(signum).name
        super().__init__(f"{name}: saved at step {step}; continue with `{resume}`")


class Diverged(Exception):
    """Too many steps in a row had a non-finite loss or gradient."""

    exit_code = 3


class ReplicasDiffer(Exception):
    """Devices that should hold the same numbers do not: a broken chip, or a program at fault."""

    exit_code = 7

    def __init__(self, step: int, devices: dict[str, list[str]]):
        shown = [
            f"{name} on {', '.join(where[:3])}{' ...' if len(where) > 3 else ''}"
            for name, where in list(devices.items())[:4]
        ]
        more = f" and {len(devices) - 4} more" if len(devices) > 4 else ""
        super().__init__(
            f"after step {step} copies of the same array differ: {'; '.join(shown)}{more}. The "
            "checkpoint before it may still be whole: test those devices, then resume"
        )


class StopRequest:
    """Turns SIGTERM and the first SIGINT into a request that the loop reads between steps.

    A second SIGINT interrupts at once, without saving. Outside the main thread, where Python
    allows no handlers, signals keep their meaning.
    """

    def __init__(self):
        self.signum: int | None = None
        self._old: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        try:
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._old[signum] = signal.signal(signum, self._handle)
        except ValueError:  # not the main thread
            self._old = {}
        return self

    def __exit__(self, *_) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _handle(self, signum, _frame) -> None:
        if signum == signal.SIGINT and self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum


def diagnose(parameters: list[str], loss, step: int, last_good: int, in_row: int) -> str:
    """What went wrong, in words: for the exception that stops the run.

    Args:
        parameters: names with a non-finite gradient.
        loss: the loss of the last step, finite or not.
        step: the last step.
        last_good: the last step that made an update (0: none did).
        in_row: steps without an update since then.
    """
    shown = ", ".join(parameters[:8])
    if len(parameters) > 8:
        shown += f" and {len(parameters) - 8} more"
    where = f"gradients of {shown}" if parameters else "no gradient alone, but their norm"
    after = f"the last good one was step {last_good}" if last_good else "no step was good"
    return (
        f"stopped at step {step}: {in_row} steps in a row were not finite, {after}. "
        f"Loss {loss}; not finite: {where}. Parameters are those of the last good step. "
        "Start again with a lower --optimizer.peak-lr, more --optimizer.warmup-steps or a smaller "
        "--optimizer.clip-norm; a fault that appears at one parameter first points at its layer."
    )
