"""The part of the parser that reads what stands inside of `tools`: calls and their arguments."""

import dataclasses
from typing import Literal

from k3jax.chat.arguments import Argument
from k3jax.chat.events import EventLog
from k3jax.chat.markup import Tag
from k3jax.chat.messages import Call
from k3jax.chat.tool_checks import find_fault

MAX_CALLS = 1024  # of one message
MAX_ARGUMENTS = 1024  # of one call

Place = Literal["tools", "call", "argument", "json"]  # the innermost element that is open


@dataclasses.dataclass
class _OpenCall:
    """A call that has not ended; a fault means that it will be dropped."""

    number: int
    tool: str | None
    index: str | None
    arguments: list[Argument] = dataclasses.field(default_factory=list)
    raw: str | None = None
    fault: str | None = None

    def blame(self, fault: str) -> None:
        """Record the first fault."""
        self.fault = self.fault or fault


class CallReader:
    """Collects the calls of one message.

    Text of a string argument is reported as it comes. Of every other type only the whole literal
    means something, so it is reported when the argument is closed.

    Args:
        log: where events go.
        required: required arguments of the declared tools, or None for no check.
    """

    def __init__(self, log: EventLog, required: dict[str, frozenset[str]] | None):
        self.calls: list[Call] = []
        self._log = log
        self._required = required
        self._place: Place = "tools"
        self._num_begun = 0
        self._call: _OpenCall | None = None
        self._argument: tuple[str, str] | None = None  # key and type, while its text counts
        self._body: list[str] = []  # of the argument or json block
        self._body_ids: list[int] = []  # those of its ids that are in no event yet

    def text(self, text: str, ids: tuple[int, ...]) -> None:
        """Text at the present place."""
        if self._argument is not None:
            self._body.append(text)
            if self._argument[1] == "string":
                self._add_argument(text, ids)
            else:
                self._body_ids += ids
        elif self._place == "json":
            self._body.append(text)
            self._body_ids += ids
        else:
            self._log.add("noise", ids, text)

    def leave(self) -> None:
        """Tools end here; a call that is still open is lost."""
        self._end_body()
        if self._call is not None:
            self._log.error(f"call {self._call.number} is not closed")
            self._call = None
            self._place = "tools"

    def error(self, text: str, ids: tuple[int, ...] = ()) -> None:
        """Report what is not the format; inside of a body it makes the call faulty."""
        if self._place in ("argument", "json"):
            self._spoil_body(text)
        self._log.error(text, ids)

    def open(self, tag: Tag, ids: tuple[int, ...]) -> None:
        """An opening tag of call, argument or json."""
        if tag.name == "call":
            self.leave()
            self._open_call(tag, ids)
            return
        self._end_body()
        if self._call is None:
            self.error(f"{tag.name} opens outside of a call", ids)
        elif tag.name == "argument":
            self._open_argument(self._call, tag, ids)
        else:
            self._place = "json"
            self._log.add("structure", ids, tag.name)

    def close(self, tag: Tag, ids: tuple[int, ...]) -> None:
        """A closing tag of call, argument or json."""
        if tag.name == "call" and self._call is not None:
            self._end_body()
            self._close_call(self._call, ids)
        elif tag.name != self._place:
            self.error(f"{tag.name} closes, but it is not open", ids)
        elif tag.name == "argument":
            self._close_argument(self._call, ids)
        else:
            self._close_json(self._call, ids)

    def _add_argument(self, text: str, ids: tuple[int, ...]) -> None:
        key, kind = self._argument
        call = self._call
        self._log.add("argument", ids, text, number=call.number, tool=call.tool, key=key, type=kind)

    def _spoil_body(self, fault: str) -> None:
        """What stands in the argument or json block is no text: its call is faulty."""
        self._call.blame(fault)
        if self._body_ids:
            self._log.add("noise", tuple(self._body_ids), "".join(self._body))
        self._body, self._body_ids, self._argument = [], [], None

    def _end_body(self) -> None:
        """Another tag ends an argument or json block that is open."""
        if self._place in ("argument", "json"):
            self._spoil_body(f"{self._place} is not closed")
            self._place = "call"

    def _open_call(self, tag: Tag, ids: tuple[int, ...]) -> None:
        self._num_begun += 1
        tool = tag.attributes.get("tool")
        call = _OpenCall(self._num_begun, tool, tag.attributes.get("index"))
        if tool is None:
            call.blame("no attribute tool")
        if self._num_begun > MAX_CALLS:
            call.blame(f"more than {MAX_CALLS} calls in a message")
        self._call = call
        self._place = "call"
        self._log.add("call_start", ids, number=call.number, tool=tool)

    def _open_argument(self, call: _OpenCall, tag: Tag, ids: tuple[int, ...]) -> None:
        key, kind = tag.attributes.get("key"), tag.attributes.get("type")
        if key is None or kind is None:
            call.blame("an argument without the attributes key and type")
        if call.raw is not None:
            call.blame("an argument after a json block")
        if len(call.arguments) >= MAX_ARGUMENTS:
            call.blame(f"more than {MAX_ARGUMENTS} arguments")
        self._argument = None if call.fault else (key, kind)
        self._place = "argument"
        self._log.add("argument_start", ids, number=call.number, tool=call.tool, key=key, type=kind)

    def _close_argument(self, call: _OpenCall, ids: tuple[int, ...]) -> None:
        if self._argument is not None:
            text = "".join(self._body)
            if self._body_ids:
                self._add_argument(text, tuple(self._body_ids))
            call.arguments.append(Argument(*self._argument, text))
        self._leave_body("argument", ids)

    def _close_json(self, call: _OpenCall, ids: tuple[int, ...]) -> None:
        text = "".join(self._body)
        counts = call.raw is None and not call.arguments  # only before the first argument
        if counts:
            call.raw = text
        if self._body_ids:
            kind = "json" if counts else "noise"
            self._log.add(kind, tuple(self._body_ids), text, number=call.number, tool=call.tool)
        self._leave_body("json", ids)

    def _leave_body(self, name: str, ids: tuple[int, ...]) -> None:
        self._body, self._body_ids, self._argument = [], [], None
        self._place = "call"
        self._log.add("structure", ids, name)

    def _close_call(self, read: _OpenCall, ids: tuple[int, ...]) -> None:
        self._call, self._place = None, "tools"
        if read.fault:
            self._log.error(f"call {read.number} is dropped: {read.fault}", ids)
            return
        is_usual = read.index == str(len(self.calls) + 1)
        call = Call(
            tool=read.tool,
            arguments=tuple(read.arguments),
            raw=read.raw,
            index=None if is_usual else read.index,
        )
        if self._required is not None:
            call = find_fault(call, self._required)
        if call.error:
            self._log.error(f"call {read.number}: {call.error}")
        self.calls.append(call)
        self._log.add("call", ids, number=read.number, tool=call.tool, call=call)
