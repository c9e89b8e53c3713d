"""How a subcommand is read from its arguments: tyro over one frozen dataclass."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import tyro


class Command(Protocol):
    """A frozen dataclass of options; its docstring and field docstrings are the help."""

    def run(self) -> int | None:
        """Do the work; the exit status, None for success."""


CommandType = TypeVar("CommandType", bound=Command)


def run_command(
    command: type[CommandType],
    name: str,
    arguments: Sequence[str],
    *,
    default: CommandType | None = None,
) -> int:
    """Parse `arguments` into `command` and run it.

    Args:
        command: the dataclass.
        name: the subcommand's name, for its help.
        arguments: what follows the name on the command line.
        default: values of options that are not given, when they depend on those that are.

    Returns:
        The exit status.

    Raises:
        SystemExit: help was asked for, or the arguments do not parse (tyro explains on stderr).
    """
    options: dict[str, Any] = {} if default is None else {"default": default}
    parsed = tyro.cli(
        command,
        prog=f"k3jax {name}",
        args=list(arguments),
        config=(tyro.conf.FlagCreatePairsOff,),
        **options,
    )
    return parsed.run() or 0
