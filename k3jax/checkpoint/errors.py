"""The error of a checkpoint that cannot be read or written."""

from collections.abc import Sequence

from k3jax.errors import UserError

SHOWN = 40


class CheckpointError(UserError):
    """A checkpoint folder that cannot be used; the message lists every fault found."""


def list_faults(faults: Sequence[str]) -> str:
    """Faults one below the other, the first `SHOWN` of them."""
    more = f"\n  and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return "\n  ".join(["", *faults[:SHOWN]]).rstrip() + more
