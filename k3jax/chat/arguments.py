"""Arguments of a tool call: typed elements whose values keep the bytes their author wrote."""

import json
import re
from typing import Any, Literal, NamedTuple

Revision = Literal["newest", "older"]

_BLANKS = re.compile(r"[ \t\n\r]*")
# Numbers are only delimited, never converted: a literal of 5000 digits is text like any other.
_SCANNER = json.JSONDecoder(strict=False, parse_int=len, parse_float=len)


class Argument(NamedTuple):
    """One `argument` element.

    Attributes:
        key: its name; names may repeat.
        type: string, number, boolean, null, object or array; a model may write others.
        text: the body: a string as it is, everything else as JSON.
    """

    key: str
    type: str
    text: str

    @property
    def value(self) -> Any:
        """The Python value; the raw text if it is no JSON."""
        if self.type == "string":
            return self.text
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return self.text


def from_values(values: dict[str, Any]) -> tuple[Argument, ...]:
    """Arguments of a dictionary; non-strings by `json.dumps` with its default separators.

    Raises:
        TypeError, ValueError, RecursionError: a value is not JSON.
    """
    return tuple(
        Argument(
            key,
            value_type(value),
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
        )
        for key, value in values.items()
    )


def value_type(value: Any) -> str:
    """XTML type of a Python value."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


def literal_type(literal: str) -> str:
    """XTML type of a JSON literal, which its first character decides."""
    names = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean"}
    return names.get(literal[:1], "null" if literal[:1] == "n" else "number")


def split_object(text: str) -> tuple[Argument, ...]:
    r"""Arguments of a JSON object, read exactly one level deep (newest revision).

    Each value keeps its own characters, `1e2` and `{"t":1}` included; strings are decoded.
    Repeated keys are all kept, text after the closing brace is dropped, control characters may
    stand in strings, and `NaN` and `Infinity` are numbers.

    Raises:
        ValueError, RecursionError: `text` is not a JSON object.
    """
    found: list[Argument] = []
    at = _expect(text, _skip(text, 0), "{")
    if text[at : at + 1] == "}":
        return ()
    while True:
        key, at = _SCANNER.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError(f"key {key!r} is not a string")
        start = _expect(text, _skip(text, at), ":")
        value, at = _SCANNER.raw_decode(text, start)
        literal = text[start:at]
        kind = literal_type(literal)
        found.append(Argument(key, kind, value if kind == "string" else literal))
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return tuple(found)
        at = _expect(text, at, ",")


def _skip(text: str, at: int) -> int:
    return _BLANKS.match(text, at).end()


def _expect(text: str, at: int, mark: str) -> int:
    """Position after `mark` and blanks."""
    if text[at : at + 1] != mark:
        raise ValueError(f"expected {mark!r} at character {at}")
    return _skip(text, at + 1)


def parse_object(text: str) -> tuple[Argument, ...] | None:
    """Arguments of a JSON object, parsed whole and written anew (older revision).

    Returns:
        The arguments, or None where `text` is malformed.

    Raises:
        ValueError: valid JSON that is no object, or text after it.
    """
    start = _skip(text, 0)
    try:
        value, at = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    if text[_skip(text, at) :]:
        raise ValueError("text follows the JSON value")
    if not isinstance(value, dict):
        raise ValueError(f"the JSON value is a {value_type(value)}, not an object")
    return from_values(value)


def write_object(arguments: tuple[Argument, ...]) -> str:
    """The arguments as one JSON object that `split_object` reads back unchanged.

    A literal that is not JSON of its declared type becomes a JSON string.
    """
    members = []
    for argument in arguments:
        text = argument.text
        if argument.type == "string" or not is_literal(text, argument.type):
            text = json.dumps(text, ensure_ascii=False)
        members.append(f"{json.dumps(argument.key, ensure_ascii=False)}: {text}")
    return "{" + ", ".join(members) + "}"


def is_literal(text: str, kind: str) -> bool:
    """Whether `text` is one JSON value of type `kind` with nothing around it."""
    try:
        _, end = _SCANNER.raw_decode(text, 0)
    except (ValueError, RecursionError):
        return False
    return end == len(text) and literal_type(text) == kind
