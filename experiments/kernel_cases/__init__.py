"""The calls of each kernel that are timed, tuned and compiled ahead of time, one file per op."""

import importlib
import pkgutil

from experiments.kernel_cases.case import KernelCase
from meshes.topology import SMALLEST

__all__ = ["KernelCase", "all_cases", "check_chip", "choose_cases", "find_cases"]

# Modules of this folder that hold a list CASES; the name of each is that of its op.
_OPS = tuple(
    module.name for module in pkgutil.iter_modules(__path__) if module.name not in ("case",)
)


def all_cases() -> list[KernelCase]:
    """Return every case, ops in alphabetical order."""
    return [
        case
        for op in _OPS
        for case in importlib.import_module(f"experiments.kernel_cases.{op}").CASES
    ]


def find_cases(*, op: str | None = None, size: str | None = None) -> list[KernelCase]:
    """Return the cases of one op, one size, or both.

    Raises:
        ValueError: there is none.
    """
    found = [case for case in all_cases() if op in (None, case.op) and size in (None, case.size)]
    if not found:
        ops, sizes = ({getattr(case, key) for case in all_cases()} for key in ("op", "size"))
        raise ValueError(
            f"no case has op={op!r} and size={size!r}; ops: {', '.join(sorted(ops))}; sizes: "
            f"{', '.join(sorted(sizes))}"
        )
    return found


def choose_cases(
    *, op: str | None = None, name: str | None = None, size: str | None = None
) -> list[KernelCase]:
    """Return the cases that options of a command line name; end the program when there is none."""
    try:
        found = find_cases(op=op, size=size)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    chosen = [case for case in found if (name or "") in case.name]
    if not chosen:
        names = ", ".join(dict.fromkeys(case.name for case in found))
        raise SystemExit(f"--name {name!r} is in the name of no call; there are: {names}")
    return chosen


def check_chip(chip: str) -> None:
    """End the program when kernels cannot be compiled for a chip of this name."""
    if chip not in SMALLEST:
        raise SystemExit(f"--chip {chip!r} is unknown; use one of {', '.join(SMALLEST)}")
