"""`k3jax resume`: continue a run exactly where its last good checkpoint stands."""

from collections.abc import Sequence

import tyro

from k3jax.cli.train import run_job
from k3jax.errors import UserError
from k3jax.train.config import RESUMABLE, TrainConfig

USAGE = "usage: k3jax resume RUN [--steps N] [--checkpoint.every N] ..."


def main(arguments: Sequence[str]) -> int:
    """`k3jax resume RUN [options]`; the configuration comes from the run, overrides are checked."""
    arguments = list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\n\nThe configuration comes from RUN/config.json; these may change:")
        print("  " + ", ".join(name.rstrip(".") for name in RESUMABLE))
        raise SystemExit(0 if arguments else 2)
    path, *options = arguments
    if path.startswith("-"):
        raise UserError(f"the run directory comes first. {USAGE}")

    def override(old: TrainConfig) -> TrainConfig:
        return tyro.cli(
            TrainConfig,
            prog=f"k3jax resume {path}",
            args=options,
            default=old,
            config=(tyro.conf.FlagCreatePairsOff,),
        )

    from k3jax.train import job

    return run_job(lambda console: job.resume(path, override, console))
