"""`k3jax resume`: continue a run exactly where its last good checkpoint stands."""

from collections.abc import Sequence

import tyro

from k3jax.cli.train import run_to_end, say
from k3jax.errors import UserError
from k3jax.train import config as train_config
from k3jax.train.config import TrainConfig

USAGE = "usage: k3jax resume RUN [--steps N] [--checkpoint.every N] ..."


def main(arguments: Sequence[str]) -> int:
    """`k3jax resume RUN [options]`; the configuration comes from the run, overrides are checked."""
    arguments = list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\n\nThe configuration comes from RUN/config.json; these may change:")
        print("  " + ", ".join(name.rstrip(".") for name in train_config.RESUMABLE))
        raise SystemExit(0 if arguments else 2)
    if arguments[0].startswith("-"):
        raise UserError(f"the run directory comes first. {USAGE}")
    from k3jax.train.run_directory import RunDirectory

    run = RunDirectory.open(arguments[0])
    try:
        old = run.train_config()
        new = tyro.cli(
            TrainConfig,
            prog=f"k3jax resume {arguments[0]}",
            args=arguments[1:],
            default=old,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        changed = train_config.check_overrides(old, new)
        from k3jax.data.corpus import load_corpus
        from k3jax.train.loop import Trainer

        corpus = load_corpus(new.data.path, held_out_fraction=new.data.held_out_fraction)
        trainer = Trainer(new, run, corpus, say)
        step = trainer.restore()
        described = run.read_config()
        described["train"] = train_config.to_dict(new)
        described["resumed"].append({"step": step, "changed": sorted(changed)})
        run.write_config(described)
        say(f"continuing at step {step}")
        return run_to_end(trainer, new)
    finally:
        run.close()
