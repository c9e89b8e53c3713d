"""`k3jax generate`: let a trained run continue a prompt."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from k3jax.cli.command import run_command
from k3jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Print what a run's newest good checkpoint writes after a prompt."""

    run_path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    prompt: str
    """Text to continue."""
    max_new_tokens: int = 200
    """Bytes to add."""
    temperature: float = 0.8
    """0 takes the most likely byte each time."""
    top_p: float = 1.0
    """Sample from the smallest set of bytes with at least this probability."""
    seed: int = 0
    """Another seed, another text."""

    def run(self) -> None:
        from k3jax.train.run_directory import RunDirectory

        source = RunDirectory(self.run_path)
        cfg = source.model_config()
        config = source.train_config()
        import jax
        import numpy as np

        from k3jax.checkpoint.run import RunCheckpoints
        from k3jax.data.bytes import BEGIN_OF_DOCUMENT, END_OF_DOCUMENT, decode, encode
        from k3jax.infer.generate import generate
        from k3jax.train.optimizer import adamw
        from k3jax.train.state import ModelParts, from_tree, to_tree, with_sharding

        parts = ModelParts(cfg)
        abstract = parts.abstract_state(adamw(config.optimizer, parts.param_names))
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        checkpoints = RunCheckpoints(source.checkpoints)
        found = checkpoints.restore_latest(with_sharding(to_tree(abstract), sharding), print)
        checkpoints.close()
        if found is None:
            raise UserError(f"{source.checkpoints} holds no usable checkpoint")
        state = from_tree(found.tree, abstract)
        ids = np.concatenate([[BEGIN_OF_DOCUMENT], encode(self.prompt)]).astype(np.int32)
        new = generate(
            parts.join(state.params, state.rest),
            ids[None],
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            key=jax.random.key(self.seed),
            stop_ids=(END_OF_DOCUMENT,),
        )
        row = np.asarray(new[0])
        ends = np.flatnonzero(row == END_OF_DOCUMENT)
        print(self.prompt + decode(row[: ends[0]] if ends.size else row))


def main(arguments: Sequence[str]) -> int:
    """`k3jax generate RUN --prompt TEXT`."""
    return run_command(Generate, "generate", arguments)
