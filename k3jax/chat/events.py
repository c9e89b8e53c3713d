"""What a parser reports while it reads; the ids of all events, joined, are the ids it was given."""

from typing import Literal, NamedTuple

from k3jax.chat.messages import Call

Kind = Literal[
    "reasoning",  # text of the think channel
    "response",  # text of the response channel
    "call_start",  # a tool call begins: `tool`, `number`
    "argument_start",  # an argument begins: `key`, `type`
    "argument",  # its text: fragments of a string, everything else whole
    "call",  # a tool call has ended: `call` holds it, and what is wrong with it
    "json",  # text in place of arguments
    "structure",  # a tag that only opens or closes
    "noise",  # text outside all channels, which is dropped
    "error",  # something that is not the format; `text` says what
    "end",  # the end of the message
    "truncated",  # the ids ended before the message did
]


class Event(NamedTuple):
    """One step of a stream.

    Attributes:
        kind: what happened.
        ids: the ids that were read for it, possibly none.
        text: text, or a description of an error.
        number: of the call within the message, from 1.
        tool: its tool.
        key: of the argument.
        type: of the argument.
        call: the finished call.
    """

    kind: Kind
    ids: tuple[int, ...]
    text: str = ""
    number: int | None = None
    tool: str | None = None
    key: str | None = None
    type: str | None = None
    call: Call | None = None


class EventLog:
    """Collects the events of one portion of ids, and all errors."""

    def __init__(self):
        self.events: list[Event] = []
        self.errors: list[str] = []

    def begin(self) -> list[Event]:
        """Start the list of a new portion."""
        self.events = []
        return self.events

    def add(self, kind: Kind, ids: tuple[int, ...], text: str = "", **fields) -> None:
        """One event."""
        self.events.append(Event(kind, ids, text, **fields))

    def error(self, text: str, ids: tuple[int, ...] = ()) -> None:
        """Something that is not the format."""
        self.errors.append(text)
        self.events.append(Event("error", ids, text))
