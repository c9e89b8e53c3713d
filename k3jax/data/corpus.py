"""The text of a run: which files, in which order, and which of them are held out.

Without a path this is the source of the running interpreter's standard library, which every
machine has. Left out: installed packages, test folders (absent from many distributions, so the
corpus would differ between machines) and generated tables (`encodings`, `pydoc_data`), where one
large file of repeated lines would decide the held-out number.

The split is by file. Files are ordered by the SHA-256 of their relative path and held out from the
front until `held_out_fraction` of all bytes is reached; a file larger than twice that share stays
in training. When no file qualifies (a single file, say) the tail of the largest one is held out.
"""

import dataclasses
import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np

from k3jax.errors import UserError

LIBRARY_EXCLUDED = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents as one byte string: document i is `text[starts[i] : starts[i + 1]]`."""

    names: tuple[str, ...]
    text: np.ndarray  # uint8 [bytes]
    starts: np.ndarray  # int64 [len(names) + 1]

    @classmethod
    def from_pairs(cls, pairs: list[tuple[str, bytes]]) -> "Documents":
        lengths = [len(raw) for _, raw in pairs]
        return cls(
            names=tuple(name for name, _ in pairs),
            text=np.frombuffer(b"".join(raw for _, raw in pairs), np.uint8),
            starts=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        )

    @property
    def num_bytes(self) -> int:
        return len(self.text)

    def document(self, index: int) -> np.ndarray:
        """Bytes of document `index`, uint8."""
        return self.text[self.starts[index] : self.starts[index + 1]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Train and held-out documents, and what identifies them."""

    source: str
    train: Documents
    held_out: Documents
    digest: str  # SHA-256 of names, contents and split
    notes: tuple[str, ...] = ()  # what the reader of the numbers should know
    is_library: bool = False  # Python's standard library, not the user's own text

    def summary(self) -> dict:
        """What `config.json` records about the corpus."""
        return {
            "source": self.source,
            "digest": self.digest,
            "train_files": len(self.train.names),
            "train_bytes": self.train.num_bytes,
            "held_out_files": len(self.held_out.names),
            "held_out_bytes": self.held_out.num_bytes,
            "notes": list(self.notes),
        }


def load_corpus(path: str | None = None, *, held_out_fraction: float = 0.06) -> Corpus:
    """Read all files, split them, and fail clearly when there is nothing to train on.

    Args:
        path: folder (or file) of UTF-8 text; None is the standard library.
        held_out_fraction: share of the bytes to hold out, in (0, 0.5].

    Raises:
        UserError: the path is missing, not readable, or holds no text.
    """
    if not 0 < held_out_fraction <= 0.5:
        raise UserError(f"data.held_out_fraction={held_out_fraction} must be in (0, 0.5]")
    notes: list[str] = []
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        source, pairs = "python standard library", _read_library(root)
    else:
        root = Path(path).expanduser()
        source, pairs = str(root), _read_folder(root, notes)
    if not pairs:
        raise UserError(
            f"no text in {root}: "
            + ("no .py files" if path is None else "no non-empty UTF-8 file in it")
            + "; name a folder of text with --data.path DIR"
        )
    train, held_out = _split(pairs, held_out_fraction, notes)
    digest = hashlib.sha256()
    for part, documents in (("train", train), ("held out", held_out)):
        for name, raw in documents:
            digest.update(f"{part}\0{name}\0{len(raw)}\0".encode())
            digest.update(raw)
    return Corpus(
        source=source,
        train=Documents.from_pairs(train),
        held_out=Documents.from_pairs(held_out),
        digest=digest.hexdigest(),
        notes=tuple(notes),
        is_library=path is None,
    )


def _read_library(root: Path) -> list[tuple[str, bytes]]:
    pairs = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LIBRARY_EXCLUDED]
        for name in files:
            if name.endswith(".py"):
                file = Path(folder, name)
                raw = file.read_bytes()
                if raw:
                    pairs.append((file.relative_to(root).as_posix(), raw))
    return sorted(pairs)


def _read_folder(root: Path, notes: list[str]) -> list[tuple[str, bytes]]:
    """Every UTF-8 file below `root` but hidden ones; what is skipped is counted in `notes`."""
    if not root.exists():
        raise UserError(
            f"data.path={root} does not exist; --data.path takes a folder of text files"
        )
    if root.is_file():
        files = [root]
    else:
        files = []

        def refuse(error: OSError):
            raise UserError(f"data.path: cannot list {error.filename}: {error.strerror}") from error

        for folder, folders, names in os.walk(root, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".")]
            files += [Path(folder, name) for name in names if not name.startswith(".")]
    pairs, not_text, unreadable = [], 0, 0
    for file in files:
        if not file.is_file():  # a pipe or device would block
            continue
        try:
            raw = file.read_bytes()
            raw.decode()
        except UnicodeDecodeError:
            not_text += 1
            continue
        except OSError:
            unreadable += 1
            continue
        if b"\0" in raw:
            not_text += 1
        elif raw:
            name = file.name if root.is_file() else file.relative_to(root).as_posix()
            # A name may hold bytes that are no UTF-8.
            pairs.append((os.fsencode(name).decode(errors="backslashreplace"), raw))
    if unreadable and not pairs:
        raise UserError(f"data.path={root}: none of its {unreadable} files can be read")
    if unreadable:
        notes.append(f"files that could not be read and were skipped: {unreadable}")
    if not_text:
        notes.append(f"files that are not UTF-8 text and were skipped: {not_text}")
    return sorted(pairs)


def _split(pairs: list[tuple[str, bytes]], fraction: float, notes: list[str]):
    target = fraction * sum(len(raw) for _, raw in pairs)
    by_hash = sorted(pairs, key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
    chosen, size = set(), 0
    for name, raw in by_hash:
        if size >= target:
            break
        if len(raw) <= 2 * target:
            chosen.add(name)
            size += len(raw)
    if chosen:
        return (
            [pair for pair in pairs if pair[0] not in chosen],
            [pair for pair in pairs if pair[0] in chosen],
        )
    largest, raw = max(pairs, key=lambda pair: len(pair[1]))
    cut = len(raw) - max(1, int(target))
    notes.append(
        f"too few files to hold one out: the last {len(raw) - cut} bytes of {largest} are held out"
    )
    train = [(name, text[:cut] if name == largest else text) for name, text in pairs]
    return [pair for pair in train if pair[1]], [(f"{largest}[{cut}:]", raw[cut:])]
