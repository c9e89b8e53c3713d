"""What a person sees while a run goes on."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 20  # progress lines of a whole run where there is no terminal


class ProgressView:
    """A bar on a terminal, a line now and then elsewhere. Use as a context manager.

    Args:
        console: where to print.
        first: steps already done.
        steps: steps in all.
    """

    def __init__(self, console: Console, first: int, steps: int):
        self.console = console
        self.steps = steps
        self.every = max(1, steps // LINES)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=first, text="")

    def __enter__(self) -> "ProgressView":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def update(self, step: int, record: dict) -> None:
        """Show a step's metrics record."""
        loss = record["loss"]
        text = f"loss {loss:.3f}" if loss is not None else "loss not finite"
        text += f" · {record['tokens_per_second']:,.0f} tokens/s"
        if record.get("overload"):
            text += f" · busiest expert +{100 * max(record['overload']):.0f} %"
        if record["skipped"]:
            text += f" · {record['skipped']} skipped"
        self._bar.update(self._task, completed=step, text=text)
        if not self.console.is_terminal and (step % self.every == 0 or step == self.steps):
            self.console.print(f"step {step}/{self.steps} · {text}", highlight=False)


class Stopwatch:
    """Seconds spent by phase, for the table at the end of a run."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._since = 0.0

    def enter(self, phase: str) -> None:
        """End the phase that runs, if any, and begin (or continue) another."""
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now
