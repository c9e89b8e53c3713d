"""Conversations as callers give them: checked, with the results of tools in the order of calls."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from k3jax.chat import arguments as args
from k3jax.chat.arguments import Revision
from k3jax.chat.messages import AssistantMessage, Call, Content, MediaItem, Message, Turn
from k3jax.chat.options import tools_body
from k3jax.errors import UserError, describe

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_SIDE = 2**31 - 1  # pixels; `Media.sizes` holds int32


class Result(NamedTuple):
    """A tool message before its place and its tool are known."""

    turn: Turn
    call_id: str | None
    where: str


class MediaSizes:
    """Hands out sizes to the images that do not state their own, in order."""

    def __init__(self, sizes: Iterable[Sequence[int]] | None):
        try:
            self.sizes = None if sizes is None else list(sizes)
        except TypeError:
            raise UserError(
                f"media_sizes={describe(sizes)} must be a list of (width, height)"
            ) from None
        # `Media.sizes` ends in rows of zeros that stand for no item.
        while self.sizes and _is_empty_row(self.sizes[-1]):
            self.sizes.pop()
        self.used = 0

    def take(self, where: str) -> Sequence[int]:
        """The next size."""
        if self.sizes is None:
            raise UserError(
                f"{where} has no size; add 'size': (width, height) of the original image, or pass "
                "media_sizes"
            )
        if self.used == len(self.sizes):
            raise UserError(f"{where} has no size: media_sizes holds only {len(self.sizes)}")
        self.used += 1
        return self.sizes[self.used - 1]

    def check_all_used(self) -> None:
        """Refuse sizes that belong to no image."""
        if self.sizes is not None and self.used != len(self.sizes):
            raise UserError(
                f"media_sizes holds {len(self.sizes)} sizes, but {self.used} images need one"
            )


def _is_empty_row(size) -> bool:
    try:
        return [int(side) for side in size] == [0, 0]
    except (TypeError, ValueError, OverflowError):
        return False


def read_messages(
    messages: Sequence[dict | AssistantMessage], revision: Revision, sizes: MediaSizes
) -> list[Message]:
    """Check `messages` and make typed ones of them.

    Raises:
        UserError: naming the message, as `messages[3]`, and the way out.
    """
    if not isinstance(messages, (list, tuple)):
        raise UserError(f"messages must be a list, got {type(messages).__name__}")
    read: list[Message] = []
    results: list[Result] = []  # of a run of consecutive tool messages
    calls: tuple[Call, ...] = ()
    num_results = 0  # since the last assistant message; a user message does not reset it
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = _role(message, where)
        if role == "tool":
            results.append(_result(message, where, sizes))
            continue
        if results:
            read += _ordered(results, calls, num_results)
            num_results += len(results)
            results = []
        if role == "assistant":
            last = index == len(messages) - 1
            read.append(_assistant(message, where, revision, sizes, last))
            calls, num_results = read[-1].calls, 0
        else:
            read.append(_turn(message, where, role, sizes))
    return read + _ordered(results, calls, num_results)


def _ordered(results: list[Result], calls: tuple[Call, ...], num_before: int) -> list[Turn]:
    """Name and number a run of results; the order of calls if every result has its call."""
    positions: dict[str, int] = {}
    for position, call in enumerate(calls):
        if call.id is not None:
            positions.setdefault(call.id, position)  # of equal ids the first call counts
    matched = [positions.get(result.call_id) for result in results]
    if None not in matched:
        in_order = sorted(range(len(results)), key=matched.__getitem__)
        turns = [
            dataclasses.replace(results[i].turn, tool=calls[matched[i]].tool) for i in in_order
        ]
    else:
        turns = [
            _named(result, calls, num_before + offset) for offset, result in enumerate(results)
        ]
    return [
        dataclasses.replace(turn, index=number)
        for number, turn in enumerate(turns, start=num_before + 1)
    ]


def _named(result: Result, calls: tuple[Call, ...], position: int) -> Turn:
    if result.turn.tool is not None:
        return result.turn
    if position < len(calls):
        return dataclasses.replace(result.turn, tool=calls[position].tool)
    raise UserError(
        f"{result.where} is the result of no known call; give the tool_call_id of a call of the "
        "assistant message before it, or the name of the tool under 'name'"
    )


def _role(message: Any, where: str) -> str:
    if isinstance(message, AssistantMessage):
        return "assistant"
    if not isinstance(message, dict):
        raise UserError(f"{where} must be an object with a role, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(
            f"{where} has the unknown role {describe(role)}; roles are {', '.join(ROLES)}"
        )
    if message.get("tools") and role not in ("system", "developer"):
        raise UserError(f"{where}: only a system message can add tools, not role {describe(role)}")
    # The released encoder knows no developer and drops it; servers write a system message.
    return "system" if role == "developer" else role


def _string(message: dict, key: str, where: str) -> str | None:
    """A text field; None if it is absent, null or empty."""
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"{where}.{key} must be a string, got {type(value).__name__} {describe(value)}"
        )
    return value or None


def _turn(message: dict, where: str, role: str, sizes: MediaSizes) -> Turn:
    content = _content(message, where, sizes if role == "user" else None)
    if not message.get("tools"):
        return Turn(role=role, content=content, name=_string(message, "name", where))
    if content:
        raise UserError(
            f"{where} adds tools, so its content is not written; put it into a message of its own"
        )
    body = tools_body(message["tools"], f"{where}.tools", added=True)
    return Turn(role=role, content=(body,), type="tool-declare")


def _result(message: dict, where: str, sizes: MediaSizes) -> Result:
    tool = _string(message, "tool", where) or _string(message, "name", where)
    turn = Turn(role="tool", content=_content(message, where, None), tool=tool)
    key = "tool_call_id" if "tool_call_id" in message else "id"
    return Result(turn, _call_id(message, key, where), where)


def _call_id(holder: dict, key: str, where: str) -> str | None:
    """The opaque name of a call; an integer counts as its digits."""
    value = holder.get(key)
    if value is None or isinstance(value, str):
        return value
    try:
        if isinstance(value, int):
            return str(value)
    except ValueError:  # more digits than Python writes
        pass
    raise UserError(f"{where}.{key} must be a string, got {describe(value)}")


def _content(message: dict, where: str, sizes: MediaSizes | None) -> Content:
    """Texts and media of a message; media only where there are `sizes`."""
    content = message.get("content")
    where = f"{where}.content"
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,) if content else ()
    if not isinstance(content, (list, tuple)):
        raise UserError(f"{where} must be text or a list of parts, got {type(content).__name__}")
    read: list[str | MediaItem] = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        if not isinstance(part, dict):
            raise UserError(f"{place} must be an object with a type, got {type(part).__name__}")
        kind = part.get("type")
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise UserError(f"{place}.text must be a string, got {describe(part.get('text'))}")
            read.append(part["text"])
        elif not isinstance(kind, str) or kind not in ("image", "image_url", "video"):
            raise UserError(
                f"{place} has the unknown type {describe(kind)}; use text, image, image_url or "
                "video"
            )
        elif sizes is None:
            raise UserError(f"{place} is of type {kind}; only user messages hold media")
        elif kind == "video":
            read += _video(part, place)
        else:
            source = _source(part.get("image", part.get("image_url")))
            read.append(MediaItem(size=_image_size(part, source, place, sizes), source=source))
    return tuple(read)


def _source(given: Any) -> Any:
    """What `process_media` takes; the OpenAI API wraps an address as `{"url": ...}`."""
    return given["url"] if isinstance(given, dict) and "url" in given else given


def _image_size(part: dict, source: Any, where: str, sizes: MediaSizes) -> tuple[int, int]:
    size = part.get("size")
    if size is None and sizes.sizes is None and isinstance(getattr(source, "size", None), tuple):
        size = source.size  # a Pillow image
    if size is None:
        size = sizes.take(where)
    try:
        width, height = size
        whole = int(width), int(height)
        if whole != (width, height) or min(whole) < 1 or max(whole) > MAX_SIDE:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"{where}: size {describe(size)} must be (width, height), each in 1..{MAX_SIDE}"
        ) from None
    return whole


def _video(part: dict, where: str) -> list[MediaItem]:
    stamps = part.get("timestamps")
    holds = isinstance(stamps, (list, tuple)) and all(isinstance(stamp, str) for stamp in stamps)
    if not holds or not stamps:
        raise UserError(
            f"{where} is a video, whose prompt is known of the predecessor only: give 'timestamps',"
            " one text for each chunk of frames"
        )
    return [MediaItem(timestamp=stamp, source=_source(part.get("video"))) for stamp in stamps]


def _assistant(
    message: dict | AssistantMessage,
    where: str,
    revision: Revision,
    sizes: MediaSizes,
    last: bool,
) -> AssistantMessage:
    if not isinstance(message, AssistantMessage):
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, (list, tuple)):
            raise UserError(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
        # The first field that is not empty counts.
        fields = [_string(message, key, where) for key in ("reasoning_content", "reasoning")]
        reasoning = fields[0] or fields[1] or ""
        if revision == "older" and not reasoning.strip():
            reasoning = ""
        message = AssistantMessage(
            reasoning=reasoning,
            content=_content(message, where, None),
            calls=tuple(
                _call(call, f"{where}.tool_calls[{number}]", revision)
                for number, call in enumerate(calls)
            ),
            name=_string(message, "name", where),
            partial=bool(message.get("partial")),
        )
    if message.partial and (message.calls or not last):
        raise UserError(f"{where}: only the last message can be partial, and only without calls")
    return message


def _call(call: Any, where: str, revision: Revision) -> Call:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise UserError(f"{where} must be an object with a function, got {describe(call)}")
    name = function.get("name")
    if not isinstance(name, str):
        raise UserError(f"{where}.function.name must be a string, got {describe(name)}")
    given = function.get("arguments")
    # A string is what a parser read; servers number the parts of a stream by integers.
    index = call.get("index") if isinstance(call.get("index"), str) else None
    read = Call(tool=name, id=_call_id(call, "id", where), index=index)
    where = f"{where}.function.arguments"
    try:
        if given is None or given == "":
            return read
        if isinstance(given, dict):
            if not all(isinstance(key, str) for key in given):
                raise ValueError(f"the keys {describe(list(given))} are not all strings")
            return dataclasses.replace(read, arguments=args.from_values(given))
        if not isinstance(given, str):
            raise TypeError(f"expected an object or JSON text, got {type(given).__name__}")
        arguments = _from_text(given, revision)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {error}") from None
    if arguments is None:
        return dataclasses.replace(read, raw=given)
    return dataclasses.replace(read, arguments=arguments)


def _from_text(text: str, revision: Revision) -> tuple[args.Argument, ...] | None:
    """Arguments of JSON text; None for text that is written as it is, in a `json` block."""
    if revision == "older":
        return args.parse_object(text) if text.strip() else ()
    try:
        return args.split_object(text)
    except (ValueError, RecursionError):
        return None
