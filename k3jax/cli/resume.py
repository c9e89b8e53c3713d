"""`k3jax resume`: continue a run exactly where its last good checkpoint stands."""

from collections.abc import Sequence
from pathlib import Path

from k3jax.cli.train import is_distributed, run_job
from k3jax.errors import UserError
from k3jax.train.supervisor import supervise

USAGE = "usage: k3jax resume RUN [--steps N] [--checkpoint.every N] ..."


def main(arguments: Sequence[str]) -> int:
    """`k3jax resume RUN [options]`; the configuration comes from the run, overrides are checked."""
    arguments = list(arguments)
    if is_distributed(arguments):
        return supervise(["resume", *arguments])
    # A parent that only watches loads neither these nor jax.
    import tyro

    from k3jax.train.config import RESUMABLE, TrainConfig

    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\n\nThe configuration comes from RUN/config.json; these options change it:")
        for name in RESUMABLE:
            option = "--" + name.replace("_", "-")
            print(f"  {option}{'... (all of them)' if option.endswith('.') else ''}")
        print("\n`k3jax resume RUN --help` shows their meaning and present values.")
        raise SystemExit(0 if arguments else 2)
    runs = [at for at, word in enumerate(arguments) if Path(word, "config.json").is_file()]
    at = runs[0] if runs and arguments[0].startswith("-") else 0
    path, options = arguments[at], arguments[:at] + arguments[at + 1 :]
    if path.startswith("-"):
        raise UserError(f"the run directory comes first. {USAGE}")

    def override(old: TrainConfig) -> TrainConfig:
        return tyro.cli(
            TrainConfig,
            prog=f"k3jax resume {path}",
            description="Continue a run. Of these options only "
            + ", ".join("--" + name.replace("_", "-").rstrip(".") for name in RESUMABLE)
            + " may change; the others show what the run was started with.",
            args=options,
            default=old,
            config=(tyro.conf.FlagCreatePairsOff,),
        )

    from k3jax.train import job

    return run_job(lambda console: job.resume(path, override, console))
