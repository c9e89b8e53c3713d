"""Where a folder can be written, and what an interrupted exchange has left there."""

import fcntl
import json
import os
import shutil
from pathlib import Path

from k3jax.checkpoint.errors import CheckpointError
from k3jax.checkpoint.folder import INDEX
from k3jax.checkpoint.manifest import MANIFEST, MAX_NAME_BYTES, read_manifest
from k3jax.config.keys import LAYOUT
from k3jax.errors import UserError

JOURNAL = "journal.json"
JOURNAL_DRAFT = JOURNAL + ".tmp"
LOCK = ".lock"
RESERVED_NAMES = (JOURNAL, JOURNAL_DRAFT, LOCK)  # no file of the result is called so
PARTIAL, REPLACED = ".partial", ".replaced-"
RANDOM_BYTES = 4


def read_journal(folder: Path) -> dict | None:
    """The journal of a folder; None when it has none, or one that is not ours."""
    try:
        journal = json.loads((folder / JOURNAL).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(journal, dict) and {"identity", "units"} <= journal.keys()
    return journal if is_ours else None


def replaced_folder(target: Path, journal: dict | None) -> Path | None:
    """Where the journal says that the former target waits, if it does."""
    name = (journal or {}).get("replaced")
    stem = target.name + REPLACED
    if not isinstance(name, str) or not name.startswith(stem):
        return None
    old = target.with_name(stem + Path(name.removeprefix(stem)).name)
    return old if old.is_dir() and not old.is_symlink() else None


def replaced_folders(target: Path) -> list[Path]:
    """The former target, moved aside by a commit that was interrupted, if there is one."""
    journals = map(read_journal, (target, partial_folder(target)))
    found = (replaced_folder(target, journal) for journal in journals)
    return [old for old in found if old is not None]


def clear_up(target: Path, old: Path | None) -> None:
    """The end of a commit of `target`, which replaced `old`.

    The journal goes last: it knows about the rest.
    """
    if old is not None:
        shutil.rmtree(old)
    (target / LOCK).unlink(missing_ok=True)
    (target / JOURNAL).unlink(missing_ok=True)


def _finish_commit(target: Path) -> None:
    """Do the rest of a commit that was interrupted after the folder had taken its place."""
    journal, lock = read_journal(target), target / LOCK
    if journal is None:
        return
    if lock.is_file():
        _refuse_running(target)
    clear_up(target, replaced_folder(target, journal))


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
    try:
        is_loop = folder.is_symlink()
        above = next(path for path in folder.parents if path.exists())
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror})") from error
    if is_loop:
        raise UserError(f"{target} is a link that leads back to itself")
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
            f"{target} is not empty; name another folder, or overwrite it (overwrite=True, "
            "--overwrite)"
        )
    _refuse_running(target)
    _refuse_foreign(target)
    return target


def _refuse_foreign(folder: Path) -> None:
    """Overwriting deletes: only what was written as a checkpoint, or converted, is replaced."""
    try:
        described = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        described = None
    if isinstance(described, dict) and "converted" in described:
        return
    if isinstance(described, dict) and "train" in described:
        raise UserError(
            f"{folder} is a run with its training history and is not overwritten; name another "
            "folder, or delete it yourself"
        )
    if not isinstance(described, dict) or described.get("model_type") not in tuple(LAYOUT):
        raise UserError(
            f"{folder} has no config.json of a model: it is neither a checkpoint nor a converted "
            "run, and is not overwritten"
        )
    known = {"config.json", INDEX, MANIFEST, LOCK, *_listed_files(folder)}
    foreign = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in known and not (path.is_file() and path.suffix == ".safetensors")
    )
    if foreign:
        raise UserError(
            f"{folder} also holds {foreign[:5]}, which overwriting would delete; move them away "
            "or name another folder"
        )


def _listed_files(folder: Path) -> set[str]:
    try:
        return set(read_manifest(folder) or {})
    except CheckpointError:
        return set()


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
