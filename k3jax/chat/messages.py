"""The messages of a conversation as typed objects: what the encoder writes and the parser returns.

Callers give dictionaries in the form of the OpenAI API; `read_messages` (reading.py) makes these.
"""

import dataclasses
from typing import Any, NamedTuple

from k3jax.chat.arguments import Argument, write_object


class MediaItem(NamedTuple):
    """An image, or one chunk of a video: one `<|media_pad|>` in the ids.

    Attributes:
        size: (width, height) of the original image; None for a video.
        timestamp: what stands before a chunk of a video; None for an image.
        source: what the message held, for `k3jax.process_media`.
    """

    size: tuple[int, int] | None = None
    timestamp: str | None = None
    source: Any = None


Content = tuple[str | MediaItem, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """A system, user or tool message.

    Attributes:
        role: system, user or tool.
        content: texts and media in order; each text is tokenised by itself.
        name: optional name of who speaks.
        type: kind of a system message that states an option, such as `tool-declare`.
        tool: name of the tool that answers.
        index: number of the answer since the last assistant message, from 1.
    """

    role: str
    content: Content
    name: str | None = None
    type: str | None = None
    tool: str | None = None
    index: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One tool call of an assistant message.

    Attributes:
        tool: name of the tool.
        arguments: in order; keys may repeat.
        raw: text in place of arguments that are not a JSON object (a `json` block).
        id: opaque name by which results refer to the call; never written.
        index: as the model wrote it; None: its place in the message, from 1.
        error: what a parser found wrong with it.
    """

    tool: str
    arguments: tuple[Argument, ...] = ()
    raw: str | None = None
    id: str | None = None
    index: str | None = None
    error: str | None = None

    @property
    def values(self) -> dict[str, Any]:
        """Arguments as Python values; of a repeated key the last."""
        return {argument.key: argument.value for argument in self.arguments}

    def to_dict(self) -> dict[str, Any]:
        """The call in the form of the OpenAI API; literals keep their characters.

        An index that is not the usual one is kept too, as a string, which `encode` reads.
        """
        text = self.raw if self.raw is not None else write_object(self.arguments)
        call = {"type": "function", "function": {"name": self.tool, "arguments": text}}
        if self.index is not None:
            call["index"] = self.index
        return call if self.id is None else {"id": self.id, **call}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantMessage:
    """What the model said. `encode` accepts it among the messages and writes it back exactly.

    Attributes:
        reasoning: text of the think channel.
        content: text of the response channel.
        calls: tool calls in order.
        name: optional name.
        partial: an open turn that the model is to continue.
        ids: all ids a parser read, in order; what was sampled is exactly this.
        complete: whether a parser saw the end of the message.
        errors: what a parser found wrong.
        num_reasoning_tokens: ids of the think channel.
    """

    reasoning: str = ""
    content: str | Content = ""
    calls: tuple[Call, ...] = ()
    name: str | None = None
    partial: bool = False
    ids: tuple[int, ...] = ()
    complete: bool = True
    errors: tuple[str, ...] = ()
    num_reasoning_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The message in the form of the OpenAI API, with `reasoning_content`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.name:
            message["name"] = self.name
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.to_dict() for call in self.calls]
        return message


Message = Turn | AssistantMessage
