"""Bytes of a picture or video: from a path, a data URL, or given as they are."""

import base64
import binascii
import contextlib
import io
import mimetypes
import os
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from k3jax.errors import UserError

# What may stand for a file; `isinstance` reads it.
BytesSource = str | os.PathLike | bytes | bytearray | memoryview

_LONGEST_NAME = 120  # characters of a path in a message


def describe_source(source: BytesSource) -> str:
    """Short name for messages."""
    if _is_data_url(source):
        return "data URL"
    if isinstance(source, str | os.PathLike):
        name = os.fsdecode(source)
        return name if len(name) <= _LONGEST_NAME else f"...{name[-_LONGEST_NAME:]}"
    return f"{len(source)} bytes"


def is_video_source(source: Any) -> bool:
    """Whether the name of a file or the type of a data URL says that it holds video."""
    if _is_data_url(source):
        return source[len("data:") :].lstrip().lower().startswith("video/")
    if not isinstance(source, str | os.PathLike):
        return False
    suffix = Path(os.fsdecode(source)).suffix
    return (mimetypes.guess_type(f"file{suffix}")[0] or "").startswith("video/")


@contextlib.contextmanager
def open_source(source: BytesSource, name: str) -> Iterator[BinaryIO]:
    """The bytes as an open binary file.

    Args:
        source: path; `data:` URL, base64 or percent-encoded; or the bytes themselves.
        name: what messages call the item.

    Raises:
        UserError: there is no such file, the data URL is malformed, or the source is empty.
    """
    name = f"{name} ({describe_source(source)})"
    if _is_data_url(source):
        source = _read_data_url(source, name)
    if not isinstance(source, str | os.PathLike):
        if not len(source):
            raise UserError(f"{name} is empty")
        yield io.BytesIO(source)
        return
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", os.fsdecode(source)):
        raise UserError(f"{name}: addresses are not fetched; pass a path, a data URL or the bytes")
    try:
        path = Path(os.fsdecode(source)).expanduser()
        if path.exists() and not path.is_file():
            raise UserError(f"{name} is not a file")
        file = path.open("rb")
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name}: {getattr(error, 'strerror', None) or error}") from error
    with file:
        if not path.stat().st_size:
            raise UserError(f"{name} is empty")
        yield file


def _is_data_url(source: Any) -> bool:
    return isinstance(source, str) and source[:5].lower() == "data:"


def _read_data_url(url: str, name: str) -> bytes:
    head, comma, payload = url.partition(",")
    if not comma:
        raise UserError(f"{name} has no comma between its type and its data")
    try:
        data = urllib.parse.unquote_to_bytes(payload)
    except UnicodeEncodeError as error:
        raise UserError(f"{name} holds half a surrogate pair, which is no text: {error}") from None
    if not head.lower().rstrip().endswith(";base64"):
        return data
    try:
        return base64.b64decode(re.sub(rb"\s", b"", data), validate=True)
    except binascii.Error as error:
        raise UserError(f"{name} is not valid base64: {error}") from error
