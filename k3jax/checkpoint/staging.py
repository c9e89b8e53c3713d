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

from k3jax.checkpoint.manifest import MAX_NAME_BYTES, sha256
from k3jax.errors import UserError

JOURNAL = "journal.json"
JOURNAL_DRAFT = JOURNAL + ".tmp"
LOCK = ".lock"
RESERVED_NAMES = (JOURNAL, JOURNAL_DRAFT, LOCK)  # no file of the result is called so
PARTIAL, REPLACED = ".partial", ".replaced-"
RANDOM_BYTES = 4
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
        _clear_up(self.target, old)

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
        old = _replaced_folder(self.target, _read_journal(self.folder))
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
        return _read_journal(self.folder) is not None or not names - {LOCK, JOURNAL_DRAFT}

    def _continue_or_clear(self) -> None:
        journal = _read_journal(self.folder)
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


def _read_journal(folder: Path) -> dict | None:
    """The journal of a folder; None when it has none, or one that is not ours."""
    try:
        journal = json.loads((folder / JOURNAL).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(journal, dict) and {"identity", "units"} <= journal.keys()
    return journal if is_ours else None


def _replaced_folder(target: Path, journal: dict | None) -> Path | None:
    """Where the journal says that the former target waits, if it does."""
    name = (journal or {}).get("replaced")
    stem = target.name + REPLACED
    if not isinstance(name, str) or not name.startswith(stem):
        return None
    old = target.with_name(stem + Path(name.removeprefix(stem)).name)
    return old if old.is_dir() and not old.is_symlink() else None


def replaced_folders(target: Path) -> list[Path]:
    """The former target, moved aside by a commit that was interrupted, if there is one."""
    journals = map(_read_journal, (target, partial_folder(target)))
    found = (_replaced_folder(target, journal) for journal in journals)
    return [old for old in found if old is not None]


def _clear_up(target: Path, old: Path | None) -> None:
    """The end of a commit. The journal goes last: it knows about the rest."""
    if old is not None:
        shutil.rmtree(old)
    (target / LOCK).unlink(missing_ok=True)
    (target / JOURNAL).unlink(missing_ok=True)


def _finish_commit(target: Path) -> None:
    """Do the rest of a commit that was interrupted after the folder had taken its place."""
    journal, lock = _read_journal(target), target / LOCK
    if journal is None:
        return
    if lock.is_file():
        _refuse_running(target)
    _clear_up(target, _replaced_folder(target, journal))


def partial_folder(target: Path) -> Path:
    """Where a target is written."""
    return target.with_name(target.name + PARTIAL)


def resolve_target(target: str | Path) -> Path:
    """The folder that is written, links followed.

    Raises:
        UserError: there cannot be such a folder.
    """
    if "\0" in str(target):
        raise UserError(f"{str(target)!r} cannot be the name of a folder")
    folder = Path(os.path.realpath(target))
    longest = folder.name + REPLACED + "0" * (2 * RANDOM_BYTES)
    for part in (*folder.parts[:-1], longest):
        if len(os.fsencode(part)) > MAX_NAME_BYTES:
            raise UserError(
                f"{target}: the name {part[:20]}... is too long; with what is added while the "
                f"folder is written, {MAX_NAME_BYTES} bytes are allowed"
            )
    if folder.is_symlink():
        raise UserError(f"{target} is a link that leads back to itself")
    try:
        above = next(path for path in folder.parents if path.exists())
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror})") from error
    if not above.is_dir():
        raise UserError(f"{target} cannot be made: {above} is a file")
    return folder


def check_target(target: str | Path, overwrite: bool) -> Path:
    """Refuse a target that must not be written.

    Returns:
        The folder to write: links are followed.

    Raises:
        UserError: a file, a folder that is not empty, or one to replace that holds no model or is
            in use; or see `resolve_target`.
    """
    target = resolve_target(target)
    if not target.exists():
        return target
    if not target.is_dir():
        raise UserError(f"{target} is a file; name a folder")
    _finish_commit(target)
    if not any(target.iterdir()):
        return target
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
    return target


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
