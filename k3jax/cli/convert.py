"""`k3jax convert`: between the released layout and run directories."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from k3jax.cli.command import run_command
from k3jax.cli.progress import ByteProgress
from k3jax.cli.target import resolve_target
from k3jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a checkpoint in another form.

    Into the released layout (--to hf): from a run's newest good checkpoint, or from a folder in the
    released layout whose experts, types or file sizes shall change. Into a run directory (--to
    run): the weights of a released checkpoint, for k3jax generate; there is nothing to resume, as
    the release has no optimizer state.

    A conversion that was interrupted continues when the same command is given again.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """Folder in the released layout, or run directory."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """Folder to make."""
    to: Literal["hf", "run"]
    """Released layout, or run directory."""
    experts: Literal["auto", "packed", "dequantized"] = "auto"
    """Routed experts in MXFP4, as numbers, or as they are."""
    rule: Literal["floor", "ceil", "even"] = "even"
    """How scales are chosen where experts are packed now."""
    dtype: Literal["stored", "bfloat16", "float16", "float32"] = "stored"
    """Type of what the release stores in bfloat16; the rest stays float32."""
    shard_gigabytes: float = 5.0
    """Largest size of a file (10^9 bytes), --to hf only."""
    overwrite: bool = False
    """Replace the checkpoint or run that DST holds."""

    def run(self) -> None:
        """Convert."""
        target = resolve_target(str(self.source))
        if target.folder is None or not self.source.is_dir():
            raise UserError(f"{self.source} is a {target.kind}; name a folder with weights")
        if target.kind == "run" and self.to == "run":
            raise UserError(f"{self.source} is a run already; --to hf writes the released layout")
        if self.shard_gigabytes <= 0:
            raise UserError(f"--shard-gigabytes={self.shard_gigabytes} must be above 0")
        try:
            with ByteProgress(f"converting {self.source}") as progress:
                self._convert(target.kind, progress)
        except KeyboardInterrupt:
            print("the same command continues this conversion", file=sys.stderr)
            raise
        print(f"{self.target} is complete; check it with: k3jax verify {self.target}")

    def _convert(self, kind: str, progress: ByteProgress) -> None:
        options = {
            "experts": self.experts,
            "rule": self.rule,
            "dtype": None if self.dtype == "stored" else self.dtype,
            "overwrite": self.overwrite,
            "progress": progress.update,
        }
        paths = (self.source, self.target)
        if self.to == "run":
            from k3jax.train.conversion import convert_hf_to_run

            convert_hf_to_run(*paths, **options)
            return
        options["shard_bytes"] = int(self.shard_gigabytes * 1e9)
        if kind == "run":
            from k3jax.train.conversion import convert_run_to_hf

            convert_run_to_hf(*paths, **options, report=_warn)
        else:
            from k3jax.checkpoint.convert import convert_hf

            convert_hf(*paths, **options)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    """`k3jax convert SRC DST --to {hf,run}`."""
    return run_command(Convert, "convert", arguments)
