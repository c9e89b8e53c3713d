"""Model output, id by id, to events and a message: the parser.

Tags are recognised by control ids alone, so text that spells a tag is text. Nothing is repaired:
what does not follow the format is reported. Every id is in exactly one event, in order.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from k3jax.chat.call_reader import CallReader
from k3jax.chat.events import Event, EventLog
from k3jax.chat.markup import Tag, read_tag
from k3jax.chat.messages import AssistantMessage
from k3jax.chat.text_stream import TextStream
from k3jax.chat.tool_checks import required_arguments
from k3jax.chat.vocabulary import Vocabulary, read_ids
from k3jax.errors import describe

MAX_TAG = 4096  # ids of one tag

CHANNELS = ("think", "response", "tools")
IN_CALLS = ("call", "argument", "json")

# The channel that is open, or inside the message but in no channel, or after it.
State = Literal["think", "response", "tools", "between", "ended"]


class StreamParser:
    """Reads one assistant turn in any portions of ids.

        parser = StreamParser(vocabulary)
        for ids in portions:
            for event in parser.push(ids):
                ...
        parser.finish()
        message = parser.message()

    Portions do not matter: `push(a + b)` gives the events of `push(a)` and of `push(b)`.

    Args:
        vocabulary: to which the ids belong.
        thinking: whether the generation prefix opened the think channel, else the response.
            Output that opens its channel itself is read as well.
        tools: the declared tools; if given, calls of other tools and calls without a required
            argument get an `error`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        thinking: bool = True,
        tools: Sequence[dict] | None = None,
    ):
        self._vocabulary = vocabulary
        self._state: State = "think" if thinking else "response"
        self._log = EventLog()
        self._text = TextStream(vocabulary)
        self._tools = CallReader(self._log, None if tools is None else required_arguments(tools))
        self._tag: list[int] | None = None  # ids since <|open|> or <|close|>
        self._ids: list[int] = []
        self._reasoning: list[str] = []
        self._response: list[str] = []
        self._num_reasoning_tokens = 0
        self._channel_is_used = (
            False  # whether the open channel has text, or was opened by the output
        )
        self._message_is_closed = False
        self._is_complete = False

    @property
    def in_reasoning(self) -> bool:
        """Whether text that follows is reasoning."""
        return self._state == "think"

    @property
    def ended(self) -> bool:
        """Whether the message has ended, or `finish` was called."""
        return self._state == "ended"

    def push(self, ids: Iterable[int]) -> list[Event]:
        """Read further ids; one that is not in the vocabulary is an error of the output.

        Raises:
            UserError: an id is not an integer; then none is read.
        """
        ids = read_ids(ids)
        events = self._log.begin()
        texts = self._vocabulary.texts
        num_ordinary = len(texts)
        for token in ids:
            self._ids.append(token)
            if not 0 <= token < num_ordinary:
                self._read_control(token)
            elif self._tag is not None:
                self._tag.append(token)
                if len(self._tag) > MAX_TAG:
                    self._drop_tag(f"a tag of more than {MAX_TAG} ids")
            elif self._text.is_between_characters and (text := texts[token]) is not None:
                self._add_text(text, (token,))
            elif piece := self._text.push(token):
                self._add_text(*piece)
        return events

    def finish(self) -> list[Event]:
        """No ids follow: reports what is unfinished."""
        events = self._log.begin()
        self._flush_text()
        if self._tag is not None:
            self._drop_tag("a tag that does not end")
        if self._state != "ended":
            self._tools.leave()
            self._state = "ended"
            self._log.add("truncated", ())
        return events

    def message(self) -> AssistantMessage:
        """What was read so far, calls up to the last whole one."""
        return AssistantMessage(
            reasoning="".join(self._reasoning),
            content="".join(self._response),
            calls=tuple(self._tools.calls),
            ids=tuple(self._ids),
            complete=self._is_complete,
            errors=tuple(self._log.errors),
            num_reasoning_tokens=self._num_reasoning_tokens,
        )

    def _add_text(self, text: str, ids: tuple[int, ...]) -> None:
        if self._state == "response":
            self._channel_is_used = True
            self._response.append(text)
            self._log.add("response", ids, text)
        elif self._state == "think":
            self._channel_is_used = True
            self._reasoning.append(text)
            self._num_reasoning_tokens += len(ids)
            self._log.add("reasoning", ids, text)
        elif self._state == "tools":
            self._tools.text(text, ids)
        else:
            self._log.add("noise", ids, text)

    def _flush_text(self) -> None:
        if piece := self._text.flush():
            self._add_text(*piece)

    def _error(self, text: str, ids: tuple[int, ...] = ()) -> None:
        self._tools.error(text, ids)  # which concerns a call if one is open

    def _read_control(self, token: int) -> None:
        """An id that is no text: a part of a tag, the end, or an error."""
        vocabulary = self._vocabulary
        self._flush_text()
        if self._state == "ended":
            self._log.add("noise", (token,), vocabulary.control_name(token) or "")
        elif token == vocabulary.separator_id and self._tag is not None:
            self._end_tag(token)
        else:
            if self._tag is not None:
                self._drop_tag("a tag that does not end")
            if token in (vocabulary.open_id, vocabulary.close_id):
                self._tag = [token]
            elif token == vocabulary.end_of_message_id:
                self._end_message(token)
            else:
                name = vocabulary.control_name(token) or f"id {describe(token)}"
                self._error(f"{name} where there is no place for it", (token,))

    def _drop_tag(self, reason: str) -> None:
        ids, self._tag = tuple(self._tag), None
        self._error(reason, ids)

    def _end_tag(self, token: int) -> None:
        """`<|sep|>` completes a tag."""
        ids = (*self._tag, token)
        self._tag = None
        raw = b"".join(map(self._vocabulary.token_bytes, ids[1:-1]))
        tag = read_tag(raw.decode(errors="replace"))
        opens = ids[0] == self._vocabulary.open_id
        if tag is None:
            self._error('a tag that is not of the form name key="value"', ids)
        elif tag.name in IN_CALLS:
            if self._state != "tools":
                self._error(f"{tag.name} outside of tools", ids)
            elif opens:
                self._tools.open(tag, ids)
            else:
                self._tools.close(tag, ids)
        elif tag.name in CHANNELS:
            (self._open_channel if opens else self._close_channel)(tag, ids)
        elif tag.name == "message":
            (self._open_message if opens else self._close_message)(tag, ids)
        else:
            self._error(f"the unknown tag {tag.name[:40]!r}", ids)

    def _end_message(self, token: int) -> None:
        self._tools.leave()
        if not self._message_is_closed:
            self._error("the message ends without its closing tag")
        self._state = "ended"
        self._is_complete = True
        self._log.add("end", (token,))

    def _open_message(self, tag: Tag, ids: tuple[int, ...]) -> None:
        """A stray wrapper is dropped, but not inside of tools."""
        if self._state == "tools":
            self._error("a message opens inside of tools", ids)
        else:
            self._log.add("structure", ids, tag.name)

    def _close_message(self, tag: Tag, ids: tuple[int, ...]) -> None:
        self._tools.leave()
        if self._state == "between":
            self._log.add("structure", ids, tag.name)
        else:
            self._error(f"the message closes before {self._state} does", ids)
        self._message_is_closed = True
        self._state = "between"

    def _open_channel(self, tag: Tag, ids: tuple[int, ...]) -> None:
        """Opens a channel wherever the output is; a repeated opener changes nothing.

        The prefix may have opened a channel that the output does not use: no error either.
        """
        if self._state == "tools" and tag.name != "tools":
            self._tools.leave()
        if self._state not in (tag.name, "between") and self._channel_is_used:
            self._error(f"{tag.name} opens before {self._state} is closed", ids)
        elif self._state == "tools":
            self._error("tools open inside of tools", ids)
        else:
            self._log.add("structure", ids, tag.name)
        self._channel_is_used = True
        self._state = tag.name

    def _close_channel(self, tag: Tag, ids: tuple[int, ...]) -> None:
        if self._state != tag.name:
            self._error(f"{tag.name} closes, but it is not open", ids)
            return
        self._tools.leave()
        self._log.add("structure", ids, tag.name)
        self._state = "between"


def parse(
    ids: Iterable[int],
    vocabulary: Vocabulary,
    *,
    thinking: bool = True,
    tools: Sequence[dict] | None = None,
) -> AssistantMessage:
    """The message of one whole output; arguments as those of `StreamParser`."""
    parser = StreamParser(vocabulary, thinking=thinking, tools=tools)
    parser.push(ids)
    parser.finish()
    return parser.message()
