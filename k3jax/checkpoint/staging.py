"""A folder that is written beside its target and takes its place when it is whole.

`TARGET.partial` holds the files, and a journal of those that are complete: an interrupted writer
with the same purpose continues there, after checking what it finds. The journal goes last, after
the folder has taken its place, so that an interruption there is understood too; a folder that is
replaced waits under `TARGET.replaced-` and a random number, which the journal records, and comes
back when nothing took its place.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import threading
from pathlib import Path

from k3jax.checkpoint.manifest import sha256
from k3jax.checkpoint.target import (
    JOURNAL,
    JOURNAL_DRAFT,
    LOCK,
    RANDOM_BYTES,
    REPLACED,
    check_target,
    clear_up,
    partial_folder,
    read_journal,
    replaced_folder,
)
from k3jax.errors import UserError

COPIED_BYTES = 1 << 22  # in memory at once

Digests = dict[str, list]  # file name -> [size, SHA-256]


class Staging:
    """See the module. Use as a context manager: leaving it without `commit` keeps the partial
    folder when there is something to continue, and removes it otherwise.

    Args:
        target: the folder to make.
        identity: what is being written; equal identities continue each other's work. None: never
            continued.
        overwrite: replace a checkpoint or run that exists.
        num_bytes: what will be written, to refuse a disk that is too small.

    Raises:
        UserError: the target exists, or is being written by another process, or does not fit.
    """

    def __init__(self, target: str | Path, *, identity: str | None, overwrite: bool, num_bytes=0):
        self.target = check_target(target, overwrite)
        self.folder = partial_folder(self.target)
        self._identity = identity
        self._replaced: str | None = None  # name of the folder that was moved aside
        self._writing = threading.Lock()
        self._committed = False
        # Complete units: name -> (file name -> [size, SHA-256]). A unit is whole or written again.
        self.units: dict[str, Digests] = {}
        self._enter_folder()
        try:
            self._restore_replaced(overwrite)
            self._continue_or_clear()
            self._check_space(num_bytes)
            self._write_journal()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, *_) -> None:
        if not self._committed and (self._identity is None or not self.units):
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    @property
    def files(self) -> Digests:
        """Every complete file."""
        return {name: entry for unit in self.units.values() for name, entry in unit.items()}

    @property
    def num_bytes(self) -> int:
        """Size of all complete files."""
        return sum(size for size, _ in self.files.values())

    def record(self, unit: str, files: Digests) -> None:
        """Note that files are complete and on disk."""
        with self._writing:
            self.units[unit] = files
            self._write_journal()

    def add(self, name: str, content: bytes | str) -> None:
        """Write a small file."""
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.record(name, {name: [path.stat().st_size, sha256(path)]})

    def copy(self, source: Path) -> None:
        """Copy a file of any size, unless it is here already."""
        if source.name in self.units:
            return
        digest, size = hashlib.sha256(), 0
        with source.open("rb") as read, (self.folder / source.name).open("wb") as written:
            while block := read.read(COPIED_BYTES):
                written.write(block)
                digest.update(block)
                size += len(block)
        self.record(source.name, {source.name: [size, digest.hexdigest()]})

    def commit(self) -> None:
        """Put the folder in the target's place."""
        for path in (*self.folder.rglob("*"), self.folder):
            _sync(path)
        old = self._move_target_aside()
        try:
            os.replace(self.folder, self.target)
        except BaseException:
            if old is not None and not self.target.exists():
                os.replace(old, self.target)
            raise
        self._committed = True
        _sync(self.target.parent)
        clear_up(self.target, old)

    def _move_target_aside(self) -> Path | None:
        if not self.target.exists():
            return None
        name = self.target.name + REPLACED + secrets.token_hex(RANDOM_BYTES)
        old = self.target.with_name(name)
        if os.path.lexists(old):
            raise UserError(f"{old} is in the way")
        self._replaced = name
        self._write_journal()
        _sync(self.folder / JOURNAL)
        os.rename(self.target, old)
        return old

    def _restore_replaced(self, overwrite: bool) -> None:
        """Undo the first half of an exchange that was interrupted."""
        old = replaced_folder(self.target, read_journal(self.folder))
        if old is not None and not self.target.exists():
            os.rename(old, self.target)
            check_target(self.target, overwrite)

    def _enter_folder(self) -> None:
        if self.folder.exists() and not self._is_ours():
            raise UserError(f"{self.folder} is in the way: it was not written by k3jax; remove it")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / LOCK).open("w")
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise UserError(f"{self.target} is being written by another process") from error

    def _is_ours(self) -> bool:
        if self.folder.is_symlink() or not self.folder.is_dir():
            return False
        names = {entry.name for entry in self.folder.iterdir()}
        return read_journal(self.folder) is not None or not names - {LOCK, JOURNAL_DRAFT}

    def _continue_or_clear(self) -> None:
        journal = read_journal(self.folder)
        try:
            if journal and self._identity is not None and journal["identity"] == self._identity:
                self.units = {
                    unit: files
                    for unit, files in journal["units"].items()
                    if all(self._is_whole(name, *entry) for name, entry in files.items())
                }
        except (OSError, ValueError, TypeError, AttributeError):
            self.units = {}
        kept = {self.folder / name for name in (*self.files, LOCK)}
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in kept:
                path.unlink()

    def _is_whole(self, name: str, size: int, digest: str) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == size and sha256(path) == digest

    def _check_space(self, num_bytes: int) -> None:
        missing = num_bytes - self.num_bytes
        free = shutil.disk_usage(self.folder).free
        if missing > free:
            raise UserError(
                f"{self.target} needs {missing:,} more bytes, but the disk has {free:,} free"
            )

    def _write_journal(self) -> None:
        temporary = self.folder / JOURNAL_DRAFT
        journal = {"identity": self._identity, "units": self.units, "replaced": self._replaced}
        temporary.write_text(json.dumps(journal))
        os.replace(temporary, self.folder / JOURNAL)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
