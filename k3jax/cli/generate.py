"""`k3jax generate`: let a trained model continue a prompt."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from k3jax.cli.command import run_command
from k3jax.errors import UserError

BYTE_VOCABULARY = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Print what a model writes after a prompt.

    The model is a run's newest good checkpoint, or a folder in the released layout whose vocabulary
    is bytes.
    """

    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory, or checkpoint folder."""
    prompt: str = ""
    """Text to continue; write --prompt=-x for one that begins with a dash."""
    image: tuple[Path, ...] = ()
    """Pictures to show before the text, for a model that sees."""
    max_new_tokens: int = 200
    """Bytes to add."""
    temperature: float = 0.7
    """0 takes the most likely byte each time."""
    top_p: float = 1.0
    """Sample from the smallest set of bytes with at least this probability."""
    seed: int = 0
    """Another seed, another text."""

    def run(self) -> None:
        model = self._load()
        from k3jax.train.samples import continue_prompts

        if self.image and model.cfg.vision is None:
            raise UserError(f"{self.target} has no vision tower; leave --image out")
        prompt = os.fsencode(self.prompt)  # the bytes that were typed, UTF-8 or not
        (text,) = continue_prompts(
            model,
            [prompt],
            pictures=self.image,
            num_bytes=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
        )
        print(prompt.decode(errors="replace") + text)

    def _load(self):
        if not self.target.is_dir():
            raise UserError(f"{self.target} is not a folder; name a run (see runs/)")
        if (self.target / "checkpoints").is_dir():
            from k3jax.train.restore import load_run

            return load_run(self.target, lambda text: print(f"warning: {text}", file=sys.stderr))
        from k3jax.checkpoint.hf import load_hf
        from k3jax.config import K3Config

        vocab_size = K3Config.from_hf(self.target).vocab_size
        if vocab_size != BYTE_VOCABULARY:
            raise UserError(
                f"{self.target} has a vocabulary of {vocab_size}: its tokenizer is not supported "
                f"yet, only bytes and control ids ({BYTE_VOCABULARY}) are"
            )
        return load_hf(self.target)


def main(arguments: Sequence[str]) -> int:
    """`k3jax generate RUN --prompt TEXT`."""
    return run_command(Generate, "generate", arguments)
