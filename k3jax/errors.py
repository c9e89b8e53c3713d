"""Errors that are the user's to fix: shown as one line, without a traceback."""


class UserError(ValueError):
    """A wrong argument, path or file; the message names the value and the way out."""
