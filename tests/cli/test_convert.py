"""`k3jax convert`, `k3jax verify` and what `k3jax inspect` says about checkpoints."""

import json
import shutil

import pytest

from k3jax.cli.main import main
from tests.golden_cases import GOLDEN
from tests.released_files import copy_checkpoint, stored_bytes


@pytest.fixture
def source(tmp_path):
    return copy_checkpoint("mxfp4", tmp_path / "source")


def test_conversion_there_and_back(source, tmp_path, capsys):
    run, back = tmp_path / "run", tmp_path / "back"
    assert main(["convert", str(source), str(run), "--to", "run"]) == 0
    assert "is complete; check it with: k3jax verify" in capsys.readouterr().out
    assert main(["verify", str(run)]) == 0
    assert main(["inspect", str(run), "--json"]) == 0
    out = capsys.readouterr().out
    facts = json.loads(out[out.index("{") :])
    assert facts["kind"] == "run" and facts["checkpoints"] == [0]
    assert main(["convert", str(run), str(back), "--to", "hf", "--shard-gigabytes", "1e-4"]) == 0
    assert stored_bytes(back) == stored_bytes(source)
    capsys.readouterr()
    assert main(["verify", str(back)]) == 0
    out = capsys.readouterr().out
    assert "320 tensors" in out and "all good" in out
    assert main(["resume", str(run)]) == 2
    assert "converted from a released checkpoint" in capsys.readouterr().err


def test_verify_fails_with_the_faults(source, capsys):
    second = source / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    assert main(["verify", str(source)]) == 1
    out = capsys.readouterr().out
    assert f"{second.name}: not a readable safetensors file" in out and "1 faults" in out


def test_verify_of_a_run_names_the_damaged_checkpoint(source, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["convert", str(source), str(run), "--to", "run"]) == 0
    (run / "checkpoints" / "0" / "digests.json").unlink()
    assert main(["verify", str(run)]) == 1
    assert "checkpoint 0: no digests.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "tiny", "{new}", "--to", "hf"], "tiny is a preset; name a folder"),
        (["convert", "{source}", "{source}", "--to", "hf"], "must not contain each other"),
        (["convert", "{source}", "{taken}", "--to", "hf"], "is not empty; name another folder"),
        (["convert", "{source}", "{taken}", "--to", "run"], "is not empty; name another folder"),
        (
            ["convert", "{source}", "{new}", "--to", "hf", "--shard-gigabytes", "0"],
            "--shard-gigabytes=0.0 must be above 0",
        ),
        (["verify", "{missing}"], "neither a preset"),
        (["verify", "{empty}"], "has no config.json"),
        (["verify", "kimi_k3"], "kimi_k3 is a preset; name a folder"),
    ],
)
def test_user_errors_are_one_line_and_leave_nothing(arguments, message, source, tmp_path, capsys):
    names = {name: tmp_path / name for name in ("new", "taken", "empty", "missing")}
    names["taken"].mkdir()
    (names["taken"] / "letter.txt").write_text("mine")
    names["empty"].mkdir()
    filled = [argument.format(source=source, **names) for argument in arguments]
    assert main(filled) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "source", "taken"]
    assert [path.name for path in names["taken"].iterdir()] == ["letter.txt"]


def test_a_run_is_not_converted_to_a_run(source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "run"), "--to", "run"]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "x"), "--to", "run"]) == 2
    assert "is a run already" in capsys.readouterr().err


def test_inspect_says_what_a_checkpoint_holds(tmp_path, capsys):
    folder = shutil.copytree(GOLDEN / "mxfp4", tmp_path / "copy")
    assert main(["inspect", str(folder), "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)["stored"]
    assert stored["num_tensors"] == 320 and stored["experts"] == "packed"
    assert not stored["vision"] and not stored["checksums"]
    assert stored["bytes_by_part"]["routed experts"] == stored["bytes_by_dtype"]["U8"] == 52_224
    assert sum(stored["bytes_by_part"].values()) == stored["num_bytes"] == 362_208
    assert "unknown" not in stored["bytes_by_part"]
    assert main(["inspect", str(GOLDEN / "vision_small")]) == 0
    printed = capsys.readouterr().out
    assert "routed experts as numbers; with vision tower; no checksums recorded" in printed
    assert "vision tower" in printed and "projector" in printed
