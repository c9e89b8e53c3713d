"""A folder that is written beside its target and takes its place when it is whole.

`TARGET.partial` holds the files, and a journal of those that are complete: an interrupted writer
with the same purpose continues there, after checking what it finds.
"""

import fcntl
import json
import os
import shutil
import threading
from pathlib import Path

from k3jax.checkpoint.manifest import sha256
from k3jax.errors import UserError

JOURNAL = "journal.json"
LOCK = ".lock"

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
        self.target = Path(os.path.abspath(target))
        check_target(self.target, overwrite)
        self.folder = self.target.with_name(self.target.name + ".partial")
        self._identity = identity
        self._writing = threading.Lock()
        self._committed = False
        # Complete units: name -> (file name -> [size, SHA-256]). A unit is whole or written again.
        self.units: dict[str, Digests] = {}
        self._enter_folder()
        try:
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

    def commit(self) -> None:
        """Put the folder in the target's place."""
        (self.folder / JOURNAL).unlink()
        (self.folder / LOCK).unlink()
        for folder in (self.folder, *filter(Path.is_dir, self.folder.rglob("*"))):
            _sync(folder)
        old = None
        if self.target.exists():
            old = self.target.with_name(self.target.name + ".replaced")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.target, old)
        os.replace(self.folder, self.target)
        _sync(self.target.parent)
        self._committed = True
        if old is not None:
            shutil.rmtree(old)

    def _enter_folder(self) -> None:
        if self.folder.exists() and not self._is_ours():
            raise UserError(f"{self.folder} is in the way: it was not written by k3jax; remove it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise UserError(f"{self.target} is being written by another process") from error

    def _is_ours(self) -> bool:
        if not self.folder.is_dir():
            return False
        names = {entry.name for entry in self.folder.iterdir()}
        return JOURNAL in names or not names - {LOCK}

    def _continue_or_clear(self) -> None:
        try:
            journal = json.loads((self.folder / JOURNAL).read_text())
            if self._identity is not None and journal["identity"] == self._identity:
                self.units = {
                    unit: files
                    for unit, files in journal["units"].items()
                    if all(self._is_whole(name, *entry) for name, entry in files.items())
                }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
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
        temporary = self.folder / (JOURNAL + ".tmp")
        temporary.write_text(json.dumps({"identity": self._identity, "units": self.units}))
        os.replace(temporary, self.folder / JOURNAL)


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that must not be written.

    Raises:
        UserError: a file, a folder that is not empty, or one to replace that holds no model or is
            in use.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target} is a file; name a folder")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise UserError(
            f"{target} is not empty; name another folder, or overwrite it (--overwrite)"
        )
    if not (target / "config.json").is_file():
        raise UserError(
            f"{target} holds no config.json: it is neither a checkpoint nor a run, and is not "
            "overwritten"
        )
    _refuse_running(target)


def _refuse_running(run: Path) -> None:
    """A run that trains holds its lock."""
    lock = run / LOCK
    if not lock.is_file():
        return
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{run} is in use by another process and is not overwritten") from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
