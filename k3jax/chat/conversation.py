"""Ids of a whole conversation back to its messages: the inverse of the encoder."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from k3jax.chat import controls
from k3jax.chat.markup import Tag, read_tag
from k3jax.chat.messages import AssistantMessage, Content, MediaItem, Message, Turn
from k3jax.chat.parser import StreamParser
from k3jax.chat.reading import MAX_SIDE
from k3jax.chat.vocabulary import Vocabulary, read_ids
from k3jax.errors import UserError, describe

_IMAGE = re.compile(r"image ([1-9][0-9]{0,9})x([1-9][0-9]{0,9})")
_INDEX = re.compile(r"[0-9]{1,10}")


class Conversation(NamedTuple):
    """Messages, options among them as system messages with a `type`, and what stands open.

    Attributes:
        messages: whole messages in order.
        open_turn: ids after the last whole message, such as the generation prefix.
    """

    messages: tuple[Message, ...]
    open_turn: tuple[int, ...]


def read_conversation(ids: Sequence[int], vocabulary: Vocabulary) -> Conversation:
    """Read what `encode` wrote; the ids of an `AssistantMessage` are those of its body.

    Raises:
        UserError: ids that `encode` does not write, naming the message.
    """
    messages: list[Message] = []
    begin = 0
    ids = read_ids(ids)
    for position, token in enumerate(ids):
        if token == vocabulary.end_of_message_id:
            where = f"message {len(messages)} of the conversation"
            messages.append(_read_message(ids[begin : position + 1], vocabulary, where))
            begin = position + 1
    return Conversation(tuple(messages), tuple(ids[begin:]))


def _read_message(ids: list[int], vocabulary: Vocabulary, where: str) -> Message:
    header, end = _read_header(ids, vocabulary, where)
    role = header.attributes.get("role")
    if role == "assistant":
        parser = StreamParser(vocabulary, thinking=False)
        parser.push(ids[end:])
        message = parser.message()
        name = header.attributes.get("name")
        return AssistantMessage(**{**vars(message), "name": name})
    closing = [vocabulary.close_id, *vocabulary.encode("message"), vocabulary.separator_id]
    body = ids[end:-1]
    if role not in ("system", "user", "tool") or body[-len(closing) :] != closing:
        raise UserError(f"{where} has the role {describe(role)}, or no closing tag of a message")
    attributes = {key: header.attributes.get(key) for key in ("name", "type", "tool")}
    index = header.attributes.get("index", "")
    return Turn(
        role=role,
        content=_read_content(body[: -len(closing)], vocabulary, where),
        index=int(index) if _INDEX.fullmatch(index) else None,
        **attributes,
    )


def _read_header(ids: list[int], vocabulary: Vocabulary, where: str) -> tuple[Tag, int]:
    """The tag that opens a message, and where it ends."""
    if ids[0] == vocabulary.open_id and vocabulary.separator_id in ids:
        end = ids.index(vocabulary.separator_id)
        tag = read_tag(vocabulary.decode(ids[1:end]))
        if tag is not None and tag.name == "message":
            return tag, end + 1
    raise UserError(f"{where} does not begin with the opening tag of a message")


def _read_content(ids: list[int], vocabulary: Vocabulary, where: str) -> Content:
    """Texts and media between control ids."""
    media = [
        vocabulary.control_id(name)
        for name in (
            controls.MEDIA_BEGIN,
            controls.MEDIA_CONTENT,
            controls.MEDIA_PAD,
            controls.MEDIA_END,
        )
    ]
    texts: list[list[int]] = [[]]
    found: list[int] = []
    for token in ids:
        if vocabulary.control_name(token) is None:
            texts[-1].append(token)
        else:
            found.append(token)
            texts.append([])
    if found != media * (len(found) // 4):
        raise UserError(f"{where} holds control tokens that do not belong into a body")
    pieces = [vocabulary.decode(text) for text in texts]
    content: list[str | MediaItem] = []
    # Of four control ids the text before is outside, then come size, nothing, nothing.
    for start in range(0, len(found), 4):
        before, description = pieces[start : start + 2]
        if description == "video":
            content.append(MediaItem(timestamp=before))
            continue
        match = _IMAGE.fullmatch(description)
        size = (int(match[1]), int(match[2])) if match else None
        if size is None or max(size) > MAX_SIDE:
            raise UserError(
                f"{where} holds media described as {describe(description)}; expected video or "
                "image <width>x<height>"
            )
        content += [before] if before else []
        content.append(MediaItem(size=size))
    return tuple(content) + ((pieces[-1],) if pieces[-1] else ())
