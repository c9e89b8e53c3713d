"""Conversations to segments and ids: the encoder."""

import dataclasses
from collections.abc import Iterable, Sequence

from k3jax.chat import controls
from k3jax.chat.arguments import Revision
from k3jax.chat.markup import Segment, SegmentWriter
from k3jax.chat.messages import AssistantMessage, Call, Content, MediaItem, Turn
from k3jax.chat.options import effort_body, response_format_body, tool_choice_body, tools_body
from k3jax.chat.reading import MediaSizes, read_messages
from k3jax.chat.vocabulary import Vocabulary
from k3jax.errors import UserError, describe

REVISIONS = ("newest", "older")


@dataclasses.dataclass(frozen=True)
class EncodedChat:
    """A conversation as segments, to be tokenised one by one.

    Attributes:
        segments: in order; each is a control token or ordinary text.
        media: images and chunks of video, in the order of their `<|media_pad|>`.
    """

    segments: tuple[Segment, ...]
    media: tuple[MediaItem, ...] = ()

    @property
    def text(self) -> str:
        """What the ids spell. Not to be tokenised: control tokens and typed text look alike."""
        return "".join(segment.text for segment in self.segments)

    def ids(self, vocabulary: Vocabulary) -> list[int]:
        """Ids, T of them, with one placeholder for each media item."""
        return self.ids_and_targets(vocabulary)[0]

    def targets(self, vocabulary: Vocabulary) -> list[bool]:
        """For each of the T ids whether training predicts it (the ids the model would sample)."""
        return self.ids_and_targets(vocabulary)[1]

    def ids_and_targets(self, vocabulary: Vocabulary) -> tuple[list[int], list[bool]]:
        """Both, for the price of one."""
        ids: list[int] = []
        targets: list[bool] = []
        for segment in self.segments:
            if segment.control:
                ids.append(vocabulary.control_id(segment.text))
            else:
                ids += vocabulary.encode(segment.text)
            targets += [segment.target] * (len(ids) - len(targets))
        return ids, targets


def encode(
    messages: Sequence[dict | AssistantMessage],
    tools: Sequence[dict] | None = None,
    *,
    thinking: bool = True,
    thinking_effort: str | None = "max",
    tool_choice: str | dict | None = None,
    response_format: str | dict | None = None,
    add_generation_prompt: bool = True,
    revision: Revision = "newest",
    media_sizes: Iterable[Sequence[int]] | None = None,
) -> EncodedChat:
    """Write a conversation in XTML, as the released encoder does.

    Order: tools, effort, messages, tool choice, response format, generation prefix. Reasoning of
    earlier turns is kept. Training targets are what assistants say, from the think body (the
    response body without thinking) to `<|end_of_msg|>`; headers, all other messages, open turns
    and `json` blocks are context.

    Args:
        messages: dictionaries in the form of the OpenAI API, or what a parser returned. `developer`
            is written as `system`. Images are parts of user messages with `size` (width, height)
            of the original. Text that spells a control token or the image needle stays text.
        tools: functions with their parameters as JSON Schema.
        thinking: write think channels; otherwise reasoning is left out, also of earlier turns.
        thinking_effort: low, high or max; None writes no message. Ignored without `thinking`.
        tool_choice: `required` and `none` write a message; `auto` and a named function do not.
        response_format: `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": ...}`.
        add_generation_prompt: open the assistant's turn at the end. A last message marked
            `partial` is left open instead.
        revision: how arguments given as text are written. "newest" keeps their characters one
            level deep; "older" parses and writes them anew, and drops blank reasoning.
        media_sizes: [N, 2] (width, height) of the images that do not state their `size`, in order,
            as in `Media.sizes`.

    Returns:
        `EncodedChat`.

    Raises:
        UserError: naming the message or option that cannot be written.
    """
    if not isinstance(revision, str) or revision not in REVISIONS:
        raise UserError(f"revision={describe(revision)} must be one of {REVISIONS}")
    sizes = MediaSizes(media_sizes)
    read = read_messages(messages, revision, sizes)
    sizes.check_all_used()
    writer = SegmentWriter()
    media: list[MediaItem] = []
    if tools:
        _write_option(writer, "tool-declare", tools_body(tools, "tools", added=False))
    if thinking and thinking_effort is not None:
        _write_option(writer, "thinking-effort", effort_body(thinking_effort))
    continued = None
    if read and isinstance(read[-1], AssistantMessage) and read[-1].partial:
        continued = read.pop()
    for message in read:
        if isinstance(message, AssistantMessage):
            _write_assistant(writer, message, thinking)
        else:
            _write_turn(writer, message, media)
    for kind, body in (
        ("tool-choice", tool_choice_body(tool_choice)),
        ("response-format", response_format_body(response_format)),
    ):
        if body is not None:
            _write_option(writer, kind, body)
    if continued is not None:
        _write_open_turn(writer, continued, thinking)
    elif add_generation_prompt:
        writer.open("message", [("role", "assistant")])
        writer.open("think" if thinking else "response")
    return EncodedChat(tuple(writer.segments), tuple(media))


def _write_option(writer: SegmentWriter, kind: str, body: str) -> None:
    writer.open("message", [("role", "system"), ("type", kind)])
    writer.text(body)
    writer.end_message()


def _write_turn(writer: SegmentWriter, turn: Turn, media: list[MediaItem]) -> None:
    optional = (("name", turn.name), ("type", turn.type), ("tool", turn.tool))
    attributes = [("role", turn.role)]
    attributes += [(key, value) for key, value in optional if value is not None]
    if turn.index is not None:
        attributes.append(("index", str(turn.index)))
    writer.open("message", attributes)
    _write_content(writer, turn.content, media)
    writer.end_message()


def _write_content(writer: SegmentWriter, content: Content, media: list[MediaItem]) -> None:
    for part in content:
        if isinstance(part, str):
            writer.text(part)
            continue
        media.append(part)
        if part.timestamp is not None:
            writer.text(part.timestamp)
        writer.control(controls.MEDIA_BEGIN)
        writer.text("video" if part.size is None else f"image {part.size[0]}x{part.size[1]}")
        writer.control(controls.MEDIA_CONTENT)
        writer.control(controls.MEDIA_PAD)
        writer.control(controls.MEDIA_END)


def _write_header(writer: SegmentWriter, message: AssistantMessage) -> None:
    attributes = [("role", "assistant")]
    if message.name:
        attributes.append(("name", message.name))
    writer.open("message", attributes)


def _write_response(writer: SegmentWriter, message: AssistantMessage) -> None:
    if isinstance(message.content, str):
        writer.text(message.content)
    else:
        _write_content(writer, message.content, [])


def _write_assistant(writer: SegmentWriter, message: AssistantMessage, thinking: bool) -> None:
    """A whole turn; what follows the first opener is a target."""
    _write_header(writer, message)
    if thinking:
        writer.open("think")
        writer.target = True
        writer.text(message.reasoning)
        writer.close("think")
    writer.open("response")
    writer.target = True
    _write_response(writer, message)
    writer.close("response")
    if message.calls:
        writer.open("tools")
        for number, call in enumerate(message.calls, start=1):
            _write_call(writer, call, number)
        writer.close("tools")
    writer.end_message()
    writer.target = False


def _write_call(writer: SegmentWriter, call: Call, number: int) -> None:
    index = str(number) if call.index is None else call.index
    writer.open("call", [("tool", call.tool), ("index", index)])
    if call.raw is not None:
        writer.target = False  # the model never writes such a block itself
        writer.open("json", [("type", "object")])
        writer.text(call.raw)
        writer.close("json")
        writer.target = True
    for argument in call.arguments:
        writer.open("argument", [("key", argument.key), ("type", argument.type)])
        writer.text(argument.text)
        writer.close("argument")
    writer.close("call")


def _write_open_turn(writer: SegmentWriter, message: AssistantMessage, thinking: bool) -> None:
    """A turn to be continued: the think channel is closed, the response is not."""
    _write_header(writer, message)
    if thinking:
        writer.open("think")
        writer.text(message.reasoning)
        writer.close("think")
    writer.open("response")
    _write_response(writer, message)
