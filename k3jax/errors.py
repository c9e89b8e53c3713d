"""Errors that are the user's to fix: shown as one line, without a traceback."""

import reprlib
from typing import Any

_LONGEST = 160  # characters of a value in a message


class UserError(ValueError):
    """A wrong argument, path or file; the message names the value and the way out."""


def describe(value: Any) -> str:
    """`value` for a message: short, whatever it holds.

    A plain `repr` fails for integers of more than 4300 digits and for deep nesting, and may be
    megabytes long.
    """
    try:
        shown = _SHORT.repr(value)
    except Exception:  # a `__repr__` may raise anything
        shown = f"<{type(value).__name__}>"
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."


class _ShortRepr(reprlib.Repr):
    """Few levels and members of containers, and integers that Python refuses to print."""

    def __init__(self):
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = _LONGEST

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 256:
            return f"<integer of {x.bit_length()} bits>"
        return repr(x)


_SHORT = _ShortRepr()
