"""`SHA256SUMS`: the checksum of every file of a folder, in the form that `sha256sum -c` reads."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from k3jax.checkpoint.errors import CheckpointError

MANIFEST = "SHA256SUMS"
MAX_NAME_BYTES = 255  # of a file, on every common file system


def is_file_name(name: str) -> bool:
    """Whether this can be the name of a file of a folder."""
    try:
        num_bytes = len(os.fsencode(name))
    except UnicodeEncodeError:
        return False
    return (
        Path(name).name == name
        and name not in ("", "..")
        and "\0" not in name
        and num_bytes <= MAX_NAME_BYTES
    )


def is_listable(name: str) -> bool:
    """Whether a manifest can hold this file name: UTF-8, on one line, nothing to be escaped."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name.splitlines() == [name] and "\\" not in name


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, digests: Mapping[str, str]) -> None:
    """Record file name -> SHA-256."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    (folder / MANIFEST).write_text("".join(lines), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, str] | None:
    """File name -> SHA-256; None when the folder has no manifest.

    Raises:
        CheckpointError: it is not one.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    digests = {}
    for number, line in enumerate(
        path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1
    ):
        digest, _, name = line.partition(" ")
        name = name[1:]  # a space or, for binary mode, an asterisk
        if len(digest) != 64 or set(digest) - set("0123456789abcdef") or not name:
            raise CheckpointError(f"{path}:{number}: not a line of SHA-256 and file name")
        if not is_file_name(name):
            raise CheckpointError(f"{path}:{number}: {name!r} is not a file of this folder")
        digests[name] = digest
    return digests
