"""`k3jax train`: start a run."""

from collections.abc import Callable, Sequence

import tyro

from k3jax.train.config import TrainConfig, preset


def main(arguments: Sequence[str]) -> int:
    """`k3jax train [MODEL] [options]`; the model's preset gives the defaults."""
    arguments = list(arguments)
    model = "tiny"
    if arguments and not arguments[0].startswith("-"):
        model = arguments.pop(0)
    config = tyro.cli(
        TrainConfig,
        prog=f"k3jax train {model}",
        args=arguments,
        default=preset(model),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    from k3jax.train import job

    return run_job(lambda console: job.train(config, console))


def run_job(job: Callable) -> int:
    """Run a training job with a console; an early end becomes its exit status.

    Returns:
        0; 143 after SIGTERM and 130 after SIGINT (saved); 3 when training diverged.
    """
    from rich.console import Console

    from k3jax.train.stopping import Diverged, Interrupted

    console = Console()
    try:
        job(console)
    except (Interrupted, Diverged) as end:
        console.print(f"[bold]{type(end).__name__.lower()}[/]: {end}", highlight=False)
        return end.exit_code
    return 0
