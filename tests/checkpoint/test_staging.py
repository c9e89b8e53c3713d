"""A staged folder: what interruptions inside the commit leave, and where targets may lie."""

import json
import os

import pytest

import k3jax
from k3jax.checkpoint import staging as staging_module
from k3jax.checkpoint.convert import convert_hf
from k3jax.checkpoint.staging import Staging
from k3jax.checkpoint.target import JOURNAL, LOCK
from k3jax.checkpoint.verify import verify_hf
from k3jax.errors import UserError
from tests.released_files import copy_checkpoint


class Killed(BaseException):
    """Stands for a process that ends at once."""


def config(content):
    """A file that tells what may be overwritten: the configuration of a model."""
    return json.dumps({"model_type": "kimi_k3", "content": content})


def stage(target, content="new", overwrite=True):
    """Write a folder of one file; equal contents continue each other."""
    with Staging(target, identity=content, overwrite=overwrite) as staging:
        if "config.json" not in staging.units:
            staging.add("config.json", config(content))
        staging.commit()


def kill_at(monkeypatch, name):
    """Let a step of the commit be the last thing that happens; nothing is undone."""

    def die(*_, **__):
        raise Killed

    monkeypatch.setattr(f"k3jax.checkpoint.staging.{name}", die)


@pytest.mark.parametrize("step", ["_sync", "os.replace", "shutil.rmtree", "clear_up"])
def test_a_commit_that_was_killed_is_continued(tmp_path, monkeypatch, step):
    target = tmp_path / "target"
    stage(target, "old")
    with Staging(target, identity="new", overwrite=True) as staging:
        staging.add("config.json", config("new"))
        with monkeypatch.context() as patched:
            if step == "os.replace":  # the second half of the exchange, and its undoing

                def replace(source, to, real=os.replace):
                    if os.fspath(to) == os.fspath(target):
                        raise Killed
                    real(source, to)

                patched.setattr("os.replace", replace)
            else:
                kill_at(patched, step)
            with pytest.raises(Killed):
                staging.commit()
    if step == "os.replace":
        assert not target.exists()
    stage(target)
    assert (target / "config.json").read_text() == config("new")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_another_writer_restores_what_was_moved_aside(tmp_path, monkeypatch):
    target = tmp_path / "target"
    stage(target, "old")
    with Staging(target, identity="new", overwrite=True) as staging:
        staging.add("config.json", config("new"))
        old = staging._move_target_aside()
    assert old.is_dir() and not target.exists()
    with pytest.raises(UserError, match="must not contain each other"):
        convert_hf(old, target)
    with pytest.raises(UserError, match="target is not empty"):
        stage(target, "third", overwrite=False)
    assert (target / "config.json").read_text() == config("old") and not old.exists()


def test_a_failed_exchange_is_undone(tmp_path, monkeypatch):
    target = tmp_path / "target"
    stage(target, "old")
    real = os.replace

    def fail(source, to):
        if os.fspath(source).endswith(".partial"):
            raise OSError("no")
        real(source, to)

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no"):
        stage(target)
    assert (target / "config.json").read_text() == config("old")


def test_folders_of_others_are_not_touched(tmp_path):
    target = tmp_path / "target"
    stage(target, "old")
    for name in ("target.replaced", "target.replaced-00000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "letter.txt").write_text("mine")
    stage(target)
    assert len(list(tmp_path.glob("target.replaced*/letter.txt"))) == 2
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / JOURNAL).write_text('{"dear": "diary"}')
    with pytest.raises(UserError, match="in the way"):
        stage(tmp_path / "other")


@pytest.mark.parametrize("kind", ["full", "empty", "dangling"])
def test_a_link_is_followed(tmp_path, kind):
    place, link = tmp_path / "place", tmp_path / "link"
    if kind == "full":
        stage(place, "old")
    elif kind == "empty":
        place.mkdir()
    link.symlink_to(place)
    if kind == "full":
        with pytest.raises(UserError, match="place is not empty"):
            stage(link, overwrite=False)
    stage(link)
    assert link.is_symlink() and (place / "config.json").read_text() == config("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "place"]


def test_targets_that_cannot_be_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    source = tmp_path / "source"
    for target, message in {
        "file/below/it": "file is a file",
        "x" * 240: "too long",
        "x" * 300 + "/y": "too long",
        "loop": "leads back to itself",
        "x/" * 3000: "File name too long",
        "a\0b": "cannot be the name",
    }.items():
        with pytest.raises(UserError, match=message):
            stage(tmp_path / target)
        with pytest.raises(UserError, match=message):
            convert_hf(source, f"{tmp_path}/{target}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_the_source_may_not_be_the_partial_folder(tmp_path):
    with pytest.raises(UserError, match="must not contain each other"):
        convert_hf(tmp_path / "target.partial", tmp_path / "target")


def test_side_files_that_clash_are_left_out(tmp_path):
    source, target = copy_checkpoint("mxfp4", tmp_path / "source"), tmp_path / "target"
    bad = [JOURNAL, f"{JOURNAL}.tmp", LOCK, "a\nb", "a\\b", os.fsdecode(b"\xff")]
    for name in [*bad, "é.txt"]:
        (source / name).write_text("side")
    with pytest.warns(UserWarning, match="not copied, rename them") as caught:
        convert_hf(source, target)
    assert "'a\\nb'" in str(caught[0].message)
    assert not {path.name for path in target.iterdir()} & set(bad)
    assert (target / "é.txt").read_text() == "side"
    assert verify_hf(target).faults == ()
    assert k3jax.load_hf(target).cfg == k3jax.load_hf(source).cfg


def test_side_files_belong_to_what_is_continued(tmp_path, monkeypatch):
    source, target = copy_checkpoint("mxfp4", tmp_path / "source"), tmp_path / "target"
    (source / "kept.txt").write_text("first")
    (source / "gone.txt").write_text("stale")
    monkeypatch.setattr(staging_module, "COPIED_BYTES", 2)  # several pieces
    with monkeypatch.context() as patched:
        kill_at(patched, "_sync")
        with pytest.raises(Killed):
            convert_hf(source, target)
    assert (tmp_path / "target.partial" / "gone.txt").exists()
    (source / "gone.txt").unlink()
    (source / "kept.txt").write_text("second")
    convert_hf(source, target)
    assert (target / "kept.txt").read_text() == "second" and not (target / "gone.txt").exists()
    assert verify_hf(target).faults == ()


def test_only_checkpoints_and_converted_runs_are_overwritten(tmp_path):
    target = tmp_path / "target"
    stage(target)
    (target / "tiktoken.model").write_text("mine")
    with pytest.raises(UserError, match=r"also holds \['tiktoken.model'\]"):
        stage(target, "newer")
    (target / "tiktoken.model").unlink()
    for described, message in (
        ({"name": "my web app"}, "no config.json of a model"),
        ({"train": {}, "model": {}, "corpus": {}}, "a run with its training history"),
    ):
        (target / "config.json").write_text(json.dumps(described))
        with pytest.raises(UserError, match=message):
            stage(target, "newer")
        assert json.loads((target / "config.json").read_text()) == described
