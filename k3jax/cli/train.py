"""`k3jax train`: start a run."""

import sys
from collections.abc import Sequence

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
    from k3jax.train.loop import new_trainer

    return run_to_end(new_trainer(config, say), config)


def say(text: str) -> None:
    """A line for the person watching."""
    print(text, file=sys.stderr, flush=True)


def run_to_end(trainer, config: TrainConfig) -> int:
    """Train, measure, draw and say what came out; shared with `k3jax resume`."""
    from k3jax.train.loop import STOPPED
    from k3jax.train.report import write_plots, write_report, write_samples

    run = trainer.run
    say(f"run directory: {run.path}")
    try:
        if not trainer.train():
            say(f"stopped at step {int(trainer.state.step)}; continue: k3jax resume {run.path}")
            return STOPPED
        table = trainer.final_evaluation()
        model = trainer.model()
        text = write_samples(run, model, config.evaluation.sample_bytes, config.seed)
        plots = write_plots(run, model, trainer.held_out.rows[0]["tokens"][None])
        write_report(run, table, plots)
    finally:
        trainer.checkpoints.close()
        run.close()
    print(text)
    print("held-out bits per byte (lower is better)")
    for name, bits in table.items():
        print(f"  {name:8s} {bits:6.3f}")
    print(f"report: {run.report_file}")
    print(f"next: k3jax generate {run.path} --prompt 'def '   |   k3jax train tiny --steps 1000")
    return 0
