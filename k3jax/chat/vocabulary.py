"""Vocabularies: text to ids and back, with the same 256 control ids after the ordinary ones."""

import abc
import base64
import binascii
import functools
import hashlib
import importlib.util
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from k3jax.chat import bpe, controls
from k3jax.errors import UserError, describe

NUM_BYTES = 256
RELEASED_FILE = "tiktoken.model"
RELEASED_DIGEST = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"

Merges = Literal["auto", "tiktoken", "python"]


class Vocabulary(abc.ABC):
    """Ordinary tokens 0..num_ordinary-1, each some bytes, then the 256 control tokens.

    Text never becomes a control id: text that spells `<|open|>` is ordinary tokens. Control ids
    are written by name, through `control_id`.

    Args:
        tokens: bytes of each ordinary token, by id.
    """

    def __init__(self, tokens: Sequence[bytes]):
        self._tokens = tokens
        self.num_ordinary = len(tokens)
        self.size = len(tokens) + controls.NUM_CONTROL
        self.open_id = self.control_id(controls.OPEN)
        self.close_id = self.control_id(controls.CLOSE)
        self.separator_id = self.control_id(controls.SEPARATOR)
        self.end_of_message_id = self.control_id(controls.END_OF_MESSAGE)  # generation stops here
        self.media_pad_id = self.control_id(controls.MEDIA_PAD)

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ordinary ids of `text`; surrogates that form no character become U+FFFD."""

    def control_id(self, name: str) -> int:
        """Id of a control token, for example `<|end_of_msg|>`."""
        if not isinstance(name, str) or name not in controls.CONTROL_OFFSETS:
            raise UserError(
                f"no control token is named {describe(name)}; k3jax.chat.CONTROL_NAMES has all"
            )
        return self.num_ordinary + controls.CONTROL_OFFSETS[name]

    def control_name(self, token: int) -> str | None:
        """Name of a control id; None for other integers."""
        if self.num_ordinary <= token < self.size:
            return controls.CONTROL_NAMES[token - self.num_ordinary]
        return None

    def token_bytes(self, token: int) -> bytes:
        """Bytes of an ordinary token, or the name of a control token.

        Raises:
            UserError: `token` is outside the vocabulary.
        """
        if 0 <= token < self.num_ordinary:
            return self._tokens[token]
        name = self.control_name(token)
        if name is None:
            raise UserError(f"id {describe(token)} is outside the vocabulary of {self.size} tokens")
        return name.encode()

    def token_text(self, token: int) -> str | None:
        """Text of an ordinary token that is whole characters; None if it is not UTF-8 alone."""
        return self.texts[token]

    @functools.cached_property
    def texts(self) -> list[str | None]:
        return [_whole_text(raw) for raw in self._tokens]

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """Text of `ids` with control tokens by name and nothing between tokens.

        Args:
            ids: integers.
            errors: what to do with bytes that are not UTF-8, as in `bytes.decode`.
        """
        return b"".join(map(self.token_bytes, read_ids(ids))).decode(errors=errors)


def read_ids(ids: Iterable[int]) -> list[int]:
    """Integers of any kind, NumPy's included, as Python's.

    Raises:
        UserError: `ids` holds anything else; text and floats are not converted.
    """
    try:
        return list(map(operator.index, ids))
    except TypeError as error:
        raise UserError(f"ids must be integers: {error}") from None


def _whole_text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def scalar_text(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates as U+FFFD, so that it has bytes."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ByteVocabulary(Vocabulary):
    """Ids 0-255 are bytes, 256-511 the control ids: id 256 + i where the released has 163584 + i.

    Needs no file; models that k3jax trains from nothing use it.
    """

    def __init__(self):
        super().__init__([bytes([value]) for value in range(NUM_BYTES)])

    def encode(self, text: str) -> list[int]:
        """Bytes of `text` in UTF-8."""
        return list(scalar_text(text).encode())


class TiktokenVocabulary(Vocabulary):
    """Byte-pair vocabulary of a tiktoken file, such as the released `tiktoken.model`.

    Args:
        ranks: token bytes to rank; ranks are 0..n-1 and all 256 single bytes are tokens.
        merges: "tiktoken" or "python" (needs the package regex); both give the same ids, except
            for characters so new that one of the packages does not know them. "auto" takes
            tiktoken where it is installed.

    Raises:
        UserError: ranks with gaps, a missing byte, or a package that is not installed.
    """

    def __init__(self, ranks: Mapping[bytes, int], *, merges: Merges = "auto"):
        tokens = sorted(ranks, key=ranks.__getitem__)
        if [ranks[token] for token in tokens] != list(range(len(tokens))):
            raise UserError(f"the ranks of {len(tokens)} tokens are not 0..{len(tokens) - 1}")
        missing = [value for value in range(NUM_BYTES) if bytes([value]) not in ranks]
        if missing:
            raise UserError(f"bytes without a token: {missing[:8]}; a vocabulary needs all 256")
        super().__init__(tokens)
        if merges == "auto":
            merges = "tiktoken" if importlib.util.find_spec("tiktoken") else "python"
        if merges == "tiktoken":
            self._encode_block = _tiktoken_encoding(dict(ranks)).encode_ordinary
        elif merges == "python":
            bpe.piece_pattern()  # says now, not at the first text, that a package is missing
            self._encode_block = bpe.BytePairMerges(ranks).encode
        else:
            raise UserError(f"merges={describe(merges)} must be 'auto', 'tiktoken' or 'python'")

    @classmethod
    def from_file(
        cls, path: str | os.PathLike, *, allow_other: bool = False, merges: Merges = "auto"
    ) -> "TiktokenVocabulary":
        """Read `tiktoken.model`, or the folder that holds it.

        Args:
            path: lines of base64 token and rank.
            allow_other: accept a file that is not byte for byte the released one.
            merges: as in the constructor.

        Raises:
            UserError: no such file, another SHA-256 digest, or a line that cannot be read.
        """
        path = Path(path)
        if path.is_dir():
            path = path / RELEASED_FILE
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read the vocabulary {path}: {error.strerror}") from None
        digest = hashlib.sha256(data).hexdigest()
        if digest != RELEASED_DIGEST and not allow_other:
            raise UserError(
                f"{path} is not the released vocabulary: SHA-256 {digest}, expected "
                f"{RELEASED_DIGEST}; pass allow_other=True if another one is meant"
            )
        return cls(_read_ranks(path, data), merges=merges)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, merged within the pieces of `bpe.PATTERN`."""
        ids: list[int] = []
        for block in bpe.guarded_blocks(scalar_text(text)):
            ids += self._encode_block(block)
        return ids


def _read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            raw = base64.b64decode(token, validate=True)
            if raw in ranks:
                raise ValueError(f"token {raw!r} occurs twice")
            ranks[raw] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(f"{path}, line {number}: expected base64 and rank ({error})") from None
    return ranks


def _tiktoken_encoding(ranks: dict[bytes, int]):
    try:
        import tiktoken
    except ImportError:
        raise UserError("merges='tiktoken' needs tiktoken; install k3jax[chat]") from None
    return tiktoken.Encoding("k3jax", pat_str=bpe.PATTERN, mergeable_ranks=ranks, special_tokens={})
