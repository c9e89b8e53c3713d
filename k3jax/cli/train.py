"""`k3jax train`: start a run."""

import itertools
import os
import sys
from collections.abc import Callable, Sequence

import tyro

from k3jax.train.config import PRESETS, TrainConfig, preset


def main(arguments: Sequence[str]) -> int:
    """`k3jax train [MODEL] [options]`; the model's preset gives the defaults."""
    arguments = list(arguments)
    model = "tiny"
    if arguments and not arguments[0].startswith("-"):
        model = arguments.pop(0)
    for given, value in itertools.pairwise([*arguments, ""]):
        if given == "--model" or given.startswith("--model="):
            model = value if given == "--model" else given.removeprefix("--model=")
    config = tyro.cli(
        TrainConfig,
        prog="k3jax train [MODEL]",
        description=f"Train a model. MODEL comes first: {', '.join(PRESETS)}, or a config.json; "
        f"each has its own defaults. Shown here are those of {model}.",
        args=arguments,
        default=preset(model),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    from k3jax.train import job

    return run_job(lambda console: job.train(config, console))


class _Unattended:
    """Standard output of work that goes on when its reader (`| head`, a terminal) leaves."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._attempt(self._stream.write, text) or len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, function, *arguments):
        try:
            return function(*arguments)
        except BrokenPipeError:
            # Also at exit, when the interpreter flushes once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            return None

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def run_job(job: Callable) -> int:
    """Run a training job with a console; an early end becomes its exit status.

    Returns:
        0; 143 after SIGTERM and 130 after SIGINT (saved); 3 when training diverged; 4 when a
        checkpoint could not be written.
    """
    from rich.console import Console

    from k3jax.checkpoint.run import CheckpointWriteError
    from k3jax.train.stopping import Diverged, Interrupted

    console = Console(file=_Unattended(sys.stdout))
    try:
        job(console)
    except (Interrupted, Diverged) as end:
        console.print(f"[bold]{type(end).__name__.lower()}[/]: {end}", highlight=False)
        return end.exit_code
    except CheckpointWriteError as error:
        console.print(f"[bold]stopped[/]: {error}", highlight=False)
        return 4
    return 0
