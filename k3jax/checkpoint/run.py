"""Checkpoints of a run by orbax: asynchronous, atomic, verified before use.

`checkpoints/<step>/` is written by orbax (plain nested dictionaries of names). When it is
committed, `digests.json` is added: size and SHA-256 of every file. A checkpoint counts when that
file exists and agrees; anything else is set aside in `checkpoints_rejected/` and reported.

With several processes each writes and reads the pieces of its devices; process 0 adds the digests
and decides which checkpoint is used.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from meshes import distributed

DIGESTS = "digests.json"
STATE, POSITION = "state", "position"  # the two items of a checkpoint
RESTORE_GB = 0.25  # of arrays that are read at the same time, or the largest
DECISION_SECONDS = 3600  # processes wait so long while process 0 reads every byte


class CheckpointWriteError(Exception):
    """A checkpoint could not be written: the disk is full, for example."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A verified checkpoint."""

    step: int
    tree: dict
    position: dict


class RunCheckpoints:
    """The checkpoints of one run directory.

    Args:
        folder: `checkpoints/` of the run.
        keep: how many of the newest to keep; at least 2, so that one remains when the newest is
            damaged.
    """

    def __init__(self, folder: Path, *, keep: int = 3):
        if keep < 2:
            raise ValueError(f"keep={keep} must be at least 2: one may be damaged")
        self.folder = Path(folder).absolute()
        self.rejected_folder = self.folder.with_name(self.folder.name + "_rejected")
        quieten()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, cleanup_tmp_directories=True, create=True
            ),
        )
        self._hashing = concurrent.futures.ThreadPoolExecutor(1, "checkpoint-digests")
        self._undigested: int | None = None
        self._digesting: concurrent.futures.Future | None = None
        self._digested_step = 0
        self._num_decisions = 0

    def save(self, step: int, tree: dict, position: dict) -> None:
        """Start writing; returns once the arrays are copied. Waits for the save before this one.

        Args:
            step: number of the checkpoint.
            tree: nested dictionary of names -> arrays.
            position: JSON dictionary (data position and what identifies the run).
        """
        self.wait()
        if jax.default_backend() == "cpu":
            # On CPU the host copy is a view of the buffer, which the next step donates.
            tree = jax.tree.map(jnp.copy, tree)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{STATE: ocp.args.StandardSave(tree), POSITION: ocp.args.JsonSave(position)}
            ),
        )
        self._undigested = step

    def poll(self) -> None:
        """Finish a save that is committed, without waiting for one that is not. Call each step."""
        if self._undigested is not None and not self._manager.is_saving_in_progress():
            self._finish_writing()
        if self._digesting is not None and self._digesting.done():
            self._finish_digests()

    def wait(self) -> None:
        """Block until the last save is committed and digested.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        if self._undigested is not None:
            self._finish_writing()
        if self._digesting is not None:
            self._finish_digests()

    def _finish_writing(self) -> None:
        step, self._undigested = self._undigested, None
        folder = self.folder / str(step)
        try:
            self._manager.wait_until_finished()  # raises what the writer raised
            if not folder.is_dir():
                raise OSError("the writer left nothing behind")
        except Exception as error:  # whatever the storage library raises, with its cause
            raise CheckpointWriteError(self._why(step, error)) from error
        if distributed.is_lead_process():
            self._digesting = self._hashing.submit(write_digests, folder)
            self._digested_step = step

    def _finish_digests(self) -> None:
        digesting, self._digesting = self._digesting, None
        try:
            digesting.result()
        except OSError as error:
            raise CheckpointWriteError(self._why(self._digested_step, error)) from error

    def _why(self, step: int, error: Exception) -> str:
        free = shutil.disk_usage(self.folder).free
        return (
            f"checkpoint {step} could not be written to {self.folder} ({free / 1e6:,.0f} MB are "
            f"free there): {error}"
        )

    def close(self) -> None:
        """Wait, then stop the writers."""
        try:
            self.wait()
        finally:
            self._hashing.shutdown()
            self._manager.close()

    def steps(self) -> list[int]:
        """Committed steps on disk, ascending."""
        return stored_steps(self.folder)

    def restore_latest(self, abstract: dict, report: Callable[[str], None]) -> Restored | None:
        """`read_latest`, with damaged checkpoints moved to `checkpoints_rejected/`.

        Raises:
            ValueError: as `read_latest`, or checkpoints exist and none is whole; nothing is moved.
        """
        step, damaged = self._decide() if distributed.is_lead_process() else (None, [])
        self._num_decisions += 1
        name = f"checkpoint/{self._num_decisions}"
        step, damaged = distributed.from_lead(name, [step, damaged], seconds=DECISION_SECONDS)
        if step is None and any((self.folder / str(n) / DIGESTS).exists() for _, n in damaged):
            raise ValueError(
                f"no checkpoint in {self.folder} can be used:\n  "
                + "\n  ".join(text for text, _ in damaged)
                + "\nRepair or delete them; a run without checkpoints starts again from step 0"
            )
        found = None if step is None else read_step(self.folder, step, abstract)
        distributed.wait_for_all(f"{name}/read", seconds=DECISION_SECONDS)
        for text, number in damaged:
            if distributed.is_lead_process():
                self.reject(number)
            report(f"{text}; moved to {self.rejected_folder / str(number)}")
        distributed.wait_for_all(f"{name}/moved")
        self._manager.reload()
        return found

    def _decide(self) -> tuple[int | None, list[tuple[str, int]]]:
        damaged: list[tuple[str, int]] = []
        step = newest_whole(self.folder, lambda text, number: damaged.append((text, number)))
        return step, damaged

    def reject(self, step: int) -> None:
        """Move a checkpoint aside, so that its step can be written again."""
        self.rejected_folder.mkdir(exist_ok=True)
        target = self.rejected_folder / str(step)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(self.folder / str(step), target)


def quieten() -> None:
    """Hide what the storage library reports of its own files at each call, also as warnings."""
    logging.getLogger("absl").setLevel(logging.ERROR)


def read_latest(folder: Path, abstract: dict, report: Callable[[str], None]) -> Restored | None:
    """Newest checkpoint that is whole, with the shapes, types and shardings of `abstract`.

    Args:
        folder: `checkpoints/` of a run, which may be in training: nothing is changed.
        abstract: nested dictionary of names -> abstract arrays with shardings.
        report: told about each damaged checkpoint passed over.

    Returns:
        None when there is no whole checkpoint.

    Raises:
        ValueError: a whole checkpoint holds other arrays than `abstract`.
    """
    step = newest_whole(folder, lambda text, _: report(text))
    return None if step is None else read_step(folder, step, abstract)


def newest_whole(folder: Path, passed_over: Callable[[str, int], None]) -> int | None:
    """Step of the newest checkpoint whose every byte is as it was written; None without any.

    Args:
        folder: `checkpoints/` of a run.
        passed_over: told what is wrong with each newer one, and its step.
    """
    for step in reversed(stored_steps(folder)):
        problem = find_damage(Path(folder) / str(step))
        if problem is None:
            return step
        passed_over(f"checkpoint {step} is damaged ({problem}), trying the one before", step)
    return None


def read_step(folder: Path, step: int, abstract: dict) -> Restored:
    """One checkpoint, unverified. Every array goes where `abstract` says, however it was saved.

    Raises:
        ValueError: it holds other arrays than `abstract`.
    """
    quieten()
    checkpoint = Path(folder).absolute() / str(step)
    # Arrays pass through host memory on their way to devices: few at a time.
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    concurrent = max(RESTORE_GB, 1.1 * largest / 1e9)
    handler = ocp.StandardCheckpointHandler(restore_concurrent_gb=concurrent)
    with ocp.Checkpointer(handler) as reader:
        stored = reader.metadata(checkpoint / STATE).item_metadata.tree
        _check_same_arrays(stored, abstract, checkpoint)
        tree = reader.restore(checkpoint / STATE, args=ocp.args.StandardRestore(abstract))
    position = json.loads((checkpoint / POSITION / "metadata").read_text())
    return Restored(step, tree, position)


def stored_steps(folder: Path) -> list[int]:
    """Step numbers of the checkpoint folders in `folder`, ascending."""
    paths = Path(folder).glob("*")
    return sorted(int(path.name) for path in paths if path.name.isdigit() and path.is_dir())


def write_digests(folder: Path) -> None:
    """Write `digests.json` for every file of a committed checkpoint, atomically."""
    table = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, _sha256(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != DIGESTS
    }
    temporary = folder / (DIGESTS + ".tmp")
    temporary.write_text(json.dumps(table, indent=1))
    os.replace(temporary, folder / DIGESTS)


def find_damage(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None when every file is as it was written."""
    try:
        table = json.loads((folder / DIGESTS).read_text())
        entries = [(name, size, digest) for name, (size, digest) in table.items()]
    except FileNotFoundError:
        return f"no {DIGESTS}: the run was killed before it was complete"
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{DIGESTS} is not readable"
    if not entries:
        return f"{DIGESTS} names no file"
    for name, size, digest in entries:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if _sha256(path) != digest:
            return f"{name} has other contents than were written"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_same_arrays(stored: dict, abstract: dict, folder: Path) -> None:
    def table(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {
            ".".join(str(getattr(entry, "key", entry)) for entry in path): (
                tuple(leaf.shape),
                jnp.dtype(leaf.dtype).name,
            )
            for path, leaf in leaves
        }

    have, want = table(stored), table(abstract)
    differ = [
        f"{name}: stored {have.get(name, 'nothing')}, expected {want.get(name, 'nothing')}"
        for name in sorted(have.keys() | want.keys())
        if have.get(name) != want.get(name)
    ]
    if differ:
        shown = "; ".join(differ[:5]) + (f"; and {len(differ) - 5} more" if len(differ) > 5 else "")
        raise ValueError(f"{folder} belongs to another configuration: {shown}")
