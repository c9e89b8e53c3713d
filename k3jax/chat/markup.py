"""The grammar of XTML: tags made of control tokens, attributes, and the segments of a document.

    open(tag, attributes) = <|open|> tag { ' ' key '="' value '"' } <|sep|>
    close(tag)            = <|close|> tag <|sep|>

Attribute values escape `&` and `"`; bodies are never escaped, because only control ids end them.
"""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from k3jax.chat.controls import CLOSE, END_OF_MESSAGE, OPEN, SEPARATOR

Attributes = Sequence[tuple[str, str]]

_TAG = re.compile(r'([^\s"=]+)((?: [^\s"=]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([^\s"=]+)="([^"]*)"')


class Segment(NamedTuple):
    """A stretch of a document that is tokenised by itself."""

    text: str
    control: bool = False  # one control token, named by `text`
    target: bool = False  # whether training predicts it


class Tag(NamedTuple):
    """What stands between `<|open|>` or `<|close|>` and `<|sep|>`."""

    name: str
    attributes: dict[str, str]


def escape(value: str) -> str:
    """An attribute value as written: `&` first, then `"`; `<` and `>` stay."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """The inverse of `escape`: the opposite order."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


@functools.lru_cache(4096)
def read_tag(text: str) -> Tag | None:
    """Read `name key="value" ...`; None if `text` is nothing of the kind.

    Of a key that occurs twice the first counts.
    """
    match = _TAG.fullmatch(text)
    if match is None:
        return None
    attributes: dict[str, str] = {}
    for key, value in _ATTRIBUTE.findall(match[2]):
        attributes.setdefault(key, unescape(value))
    return Tag(match[1], attributes)


class SegmentWriter:
    """Collects segments; `target` says whether what follows is a training target."""

    def __init__(self):
        self.segments: list[Segment] = []
        self.target = False

    def control(self, name: str) -> None:
        """One control token."""
        self.segments.append(Segment(name, True, self.target))

    def text(self, text: str) -> None:
        """Ordinary text, whatever it spells; empty text is no segment."""
        if text:
            self.segments.append(Segment(text, False, self.target))

    def open(self, tag: str, attributes: Attributes = ()) -> None:
        """An opening tag; name, keys and values are segments of their own."""
        self.control(OPEN)
        self.text(tag)
        for key, value in attributes:
            self.text(f" {key}")
            self.text('="')
            self.text(escape(value))
            self.text('"')
        self.control(SEPARATOR)

    def close(self, tag: str) -> None:
        """A closing tag."""
        self.control(CLOSE)
        self.text(tag)
        self.control(SEPARATOR)

    def end_message(self) -> None:
        """The closing tag of a message and the token at which generation stops."""
        self.close("message")
        self.control(END_OF_MESSAGE)
