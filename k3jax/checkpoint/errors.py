"""The error of a checkpoint that cannot be read or written."""

from collections.abc import Sequence

from k3jax.errors import UserError

SHOWN = 40


class CheckpointError(UserError):
    """A checkpoint folder that cannot be used; the message lists every fault found."""


def show_name(name: str) -> str:
    """A name as one printable word; as a string literal when it is blank or cannot be printed."""
    return name if name.isprintable() and name.split() == [name] else ascii(name)


def list_faults(faults: Sequence[str]) -> str:
    """Faults one below the other, the first `SHOWN` of them."""
    more = f"\n  and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return "\n  ".join(["", *faults[:SHOWN]]).rstrip() + more
