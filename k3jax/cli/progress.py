"""A progress bar over bytes: on a terminal only, on stderr."""

import threading

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ByteProgress:
    """Use as a context manager; `update` may be called from any thread."""

    def __init__(self, title: str):
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=None)
        self._lock = threading.Lock()

    def __enter__(self) -> "ByteProgress":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Note bytes done since the last call, and all there are."""
        with self._lock:
            self._bar.update(self._task, advance=done, total=total)
