"""`k3jax verify`: is everything of a checkpoint there, and as it was written?"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from k3jax.cli.command import run_command
from k3jax.cli.progress import ByteProgress
from k3jax.cli.target import resolve_target
from k3jax.errors import UserError

FAULTY = 1  # exit status


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    """Read every byte of a checkpoint and report what is wrong with it.

    In the released layout: missing, unknown, misshaped and wrongly typed tensors, numbers that are
    not finite, MXFP4 scale bytes of 255, and the checksums in SHA256SUMS where that file exists
    (k3jax writes it; sha256sum -c reads it). Of a run: the checksums of each of its checkpoints.
    The exit status is 0 when nothing is wrong, 1 otherwise.
    """

    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder in the released layout, or run directory."""

    def run(self) -> int:
        """Print the faults and a summary."""
        target = resolve_target(str(self.target))
        if target.folder is None or not self.target.is_dir():
            raise UserError(f"{self.target} is a {target.kind}; name a folder with weights")
        faults = self._verify_run() if target.kind == "run" else self._verify_checkpoint()
        for fault in faults:
            print(printable(fault))
        if faults:
            print(f"{self.target}: {len(faults)} faults")
        return FAULTY if faults else 0

    def _verify_checkpoint(self) -> tuple[str, ...]:
        from k3jax.checkpoint.verify import verify_hf

        with ByteProgress(f"verifying {self.target}") as progress:
            found = verify_hf(self.target, progress.update)
        checksums = "no SHA256SUMS to compare with"
        if found.num_checksums is not None:
            checksums = f"{found.num_checksums} files compared with SHA256SUMS"
        state = "read" if found.faults else "all good"
        print(
            f"{self.target}: {found.num_tensors:,} tensors, {found.num_bytes:,} bytes, {state}; "
            f"{checksums}"
        )
        return found.faults

    def _verify_run(self) -> tuple[str, ...]:
        from k3jax.checkpoint.run import find_damage, stored_steps

        folder = self.target / "checkpoints"
        steps = stored_steps(folder)
        if not steps:
            raise UserError(f"{folder} holds no checkpoint yet")
        total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        faults = []
        with ByteProgress(f"verifying {self.target}") as progress:
            for step in steps:
                checkpoint = folder / str(step)
                damage = find_damage(checkpoint)
                if damage is not None:
                    faults.append(f"checkpoint {step}: {damage}")
                files = (path for path in checkpoint.rglob("*") if path.is_file())
                progress.update(sum(path.stat().st_size for path in files), total)
        print(f"{self.target}: checkpoints {', '.join(map(str, steps))}, {total:,} bytes read")
        return tuple(faults)


def printable(text: str) -> str:
    """`text` with what the terminal cannot show escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def main(arguments: Sequence[str]) -> int:
    """`k3jax verify DIR`."""
    return run_command(Verify, "verify", arguments)
