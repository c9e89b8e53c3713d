"""Entry point of `k3jax`: chooses the subcommand, teaches when there is none, shows errors."""

import dataclasses
import difflib
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from k3jax.errors import UserError

DEBUG_VARIABLE = "K3JAX_DEBUG"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subcommand:
    """A line of the overview. The module's `main(arguments) -> int` does the work."""

    module: str
    summary: str
    examples: tuple[str, ...]


# Modules are imported when called, so the overview needs neither jax nor the other commands.
SUBCOMMANDS: dict[str, Subcommand] = {
    "train": Subcommand(
        module="k3jax.cli.train",
        summary="Train a model; writes metrics, checkpoints, plots, samples and a report.",
        examples=(
            "k3jax train tiny",
            "k3jax train tiny --data.path TEXTS --optimizer.peak-lr 2e-3",
        ),
    ),
    "resume": Subcommand(
        module="k3jax.cli.resume",
        summary="Continue a run exactly where its last good checkpoint stands.",
        examples=("k3jax resume runs/tiny",),
    ),
    "generate": Subcommand(
        module="k3jax.cli.generate",
        summary="Let a trained run continue a prompt.",
        examples=(
            "k3jax generate runs/tiny --prompt 'def main('",
            "k3jax generate runs/tiny --image runs/tiny/pictures/WORD.png",
        ),
    ),
    "inspect": Subcommand(
        module="k3jax.cli.inspect",
        summary="Print layers, parameters, FLOPs and cache bytes of a model.",
        examples=("k3jax inspect kimi_k3", "k3jax inspect runs/tiny --length 65536 --json"),
    ),
    "plan": Subcommand(
        module="k3jax.cli.plan",
        summary="Rank the meshes of a machine for a model: memory, traffic, time, limits.",
        examples=(
            "k3jax plan kimi_k3 --chips v5p:4096 --batch 4096 --length 8192",
            "k3jax plan small --chips h200:8 --batch 64 --length 2048",
        ),
    ),
    "convert": Subcommand(
        module="k3jax.cli.convert",
        summary="Write weights in the released layout, or make a run directory of them.",
        examples=(
            "k3jax convert runs/tiny tiny-hf --to hf --dtype bfloat16",
            "k3jax convert CHECKPOINT unpacked --to hf --experts dequantized",
        ),
    ),
    "verify": Subcommand(
        module="k3jax.cli.verify",
        summary="Read every byte of a checkpoint: checksums, names, values.",
        examples=("k3jax verify CHECKPOINT",),
    ),
}

_FIRST_STEPS = """\
[bold]First steps[/]
  1. k3jax train tiny            a few minutes on two CPU cores
  2. open runs/tiny/report.html  what it learned, with plots and samples
  3. k3jax generate runs/tiny --prompt 'import '
  4. k3jax inspect kimi_k3       the released model in numbers

Every command explains its options: [bold]k3jax COMMAND --help[/]"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `k3jax` with the given arguments (those of the process by default).

    Returns:
        0 on success, 2 when the user has something to fix, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if not os.environ.get(DEBUG_VARIABLE):  # libraries report their inner workings there
        logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        if name in ("-h", "--help", "help"):
            return _show_overview()
        if name in ("-V", "--version"):
            return _show_version()
        status = load(name).main(rest)
        sys.stdout.flush()  # a reader that has gone shows here, not at exit
        return status
    except (UserError, FileNotFoundError) as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        print(
            f"k3jax {name}: {error}" if name in SUBCOMMANDS else f"k3jax: {error}", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: not an error. The interpreter would
        # try to flush once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def load(name: str):
    """Import the module of a subcommand.

    Raises:
        UserError: there is no such subcommand.
    """
    if name not in SUBCOMMANDS:
        nearest = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise UserError(
            f"unknown command {name!r}{hint}. Commands: {', '.join(SUBCOMMANDS)}; "
            f"k3jax --help explains them"
        )
    return importlib.import_module(SUBCOMMANDS[name].module)


def _show_overview() -> int:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    console = Console(highlight=False)
    console.print("[bold]k3jax[/]: Kimi K3 in JAX - the exact model, its training and inference\n")
    console.print("[bold]Usage[/]: k3jax COMMAND ...\n")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    for name, subcommand in SUBCOMMANDS.items():
        table.add_row(f"[bold]{name}[/]", subcommand.summary)
        for example in subcommand.examples:
            table.add_row("", f"[dim]{example}[/]")
    console.print("[bold]Commands[/]")
    console.print(Padding(table, (0, 0, 0, 2)))
    console.print()
    console.print(_FIRST_STEPS)
    return 0


def _show_version() -> int:
    from importlib.metadata import version

    print(", ".join(f"{package} {version(package)}" for package in ("k3jax", "jax", "flax")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
