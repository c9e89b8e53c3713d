"""`k3jax train`: start a run."""

import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from k3jax.errors import UserError
from k3jax.train.supervisor import follow_parent, is_worker, supervise


def main(arguments: Sequence[str]) -> int:
    """`k3jax train [MODEL] [options]`; the model's preset gives the defaults."""
    arguments = list(arguments)
    if is_distributed(arguments):
        return supervise(["train", *arguments])
    # A parent that only watches loads neither these nor jax.
    import tyro

    from k3jax.train.config import PRESETS, TrainConfig, preset

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


def is_distributed(arguments: Sequence[str]) -> bool:
    """Whether this process is to start a worker and watch over it."""
    return "--distributed" in arguments and not is_worker()


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

    The worker of a distributed run ends here.

    Returns:
        0; 143 after SIGTERM and 130 after SIGINT (saved); 3 when training diverged; 4 when a
        checkpoint could not be written; 6 when processes of a distributed run did not meet in time;
        7 when devices disagreed on what they hold copies of. (5 is the parent's: a process died.)
    """
    if not is_worker():
        return _run(job)
    from k3jax.train.processes import leave

    follow_parent()
    try:
        code = _run(job)
    except (UserError, FileNotFoundError) as error:
        print(f"k3jax: {error}", file=sys.stderr)
        code = getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return leave(code)


def _run(job: Callable) -> int:
    from rich.console import Console

    from k3jax.checkpoint.run import CheckpointWriteError
    from k3jax.train.stopping import Diverged, Interrupted, ReplicasDiffer

    console = Console(file=_Unattended(sys.stdout))
    try:
        job(console)
    except (Interrupted, Diverged, ReplicasDiffer) as end:
        console.print(f"[bold]{type(end).__name__.lower()}[/]: {end}", highlight=False)
        return end.exit_code
    except CheckpointWriteError as error:
        console.print(f"[bold]stopped[/]: {error}", highlight=False)
        return 4
    return 0
