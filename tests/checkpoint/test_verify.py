"""`verify`: every kind of fault is found and named, and a whole checkpoint has none."""

import contextlib
import io
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import k3jax
from k3jax.checkpoint.folder import INDEX
from k3jax.checkpoint.manifest import MANIFEST
from k3jax.checkpoint.verify import count_non_finite, verify_hf
from k3jax.cli.verify import Verify, printable
from tests.golden_cases import golden_case
from tests.released_files import copy_checkpoint

SECOND = "model-00002-of-00002.safetensors"
NORM = "language_model.model.norm.weight"
SCALE = "language_model.model.layers.3.block_sparse_moe.experts.5.w2.weight_scale"
DECAY = "language_model.model.layers.2.self_attn.A_log"


@pytest.fixture
def stored(tmp_path):
    return copy_checkpoint("mxfp4", tmp_path / "stored")


def test_whole_checkpoint_has_no_fault(stored, tmp_path):
    found = verify_hf(stored)
    assert found.faults == () and found.num_tensors == 320 and found.num_checksums is None
    k3jax.save_hf(k3jax.load_hf(stored), tmp_path / "saved", shard_bytes=100_000)
    reports = []
    found = verify_hf(tmp_path / "saved", lambda done, total: reports.append((done, total)))
    assert found.faults == () and found.num_checksums == 6
    assert sum(done for done, _ in reports) == 362_208


def test_wrong_values_are_found(stored):
    tensors = load_file(stored / SECOND)
    tensors[NORM] = tensors[NORM].copy()
    tensors[NORM][:3] = [np.nan, np.inf, -np.inf]
    tensors[SCALE][3, 0] = 255
    tensors[DECAY][-1] = 0.5
    save_file(tensors, stored / SECOND)
    faults = verify_hf(stored).faults
    assert len(faults) == 3
    text = "\n".join(faults)
    assert f"{NORM}: 3 numbers are not finite" in text
    assert f"{SCALE}: 1 scale bytes are 255" in text
    assert f"{DECAY}: entries from 3 on must be zero padding, found 0.5" in text


def test_faults_of_names_and_files_are_found_together(stored):
    tensors = load_file(stored / SECOND)
    del tensors[NORM]
    tensors["surplus"] = np.zeros(2, np.float64)
    save_file(tensors, stored / SECOND)
    faults = "\n".join(verify_hf(stored).faults)
    assert "missing: model.norm.weight" in faults and "unknown: surplus" in faults
    assert "total_size 362208 but the tensors have" in faults
    (stored / SECOND).write_bytes((stored / SECOND).read_bytes()[:-5])
    faults = verify_hf(stored).faults
    assert len(faults) == 1 and "truncated" in faults[0]
    (stored / SECOND).unlink()
    (fault,) = verify_hf(stored).faults
    assert "files that do not exist" in fault and SECOND in fault


def test_recorded_checksums_are_compared(stored, tmp_path):
    target = tmp_path / "saved"
    k3jax.save_hf(k3jax.load_hf(stored), target, shard_bytes=200_000)
    file = sorted(target.glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    (target / INDEX).write_text((target / INDEX).read_text() + " ")
    faults = verify_hf(target).faults
    assert sorted(faults) == sorted(
        f"checksum: {name} has other contents than were recorded" for name in (INDEX, file.name)
    )
    lines = (target / MANIFEST).read_text().splitlines(keepends=True)
    kept = [line for line in lines if INDEX not in line and file.name not in line]
    (target / MANIFEST).write_text("".join([*kept, f"{'0' * 64}  gone.txt\n"]))
    assert sorted(verify_hf(target).faults) == [
        "checksum: gone.txt is missing",
        f"checksum: {file.name} is not recorded",
    ]
    (target / MANIFEST).write_text("what\n")
    with pytest.raises(k3jax.errors.UserError, match=r"SHA256SUMS:1: not a line"):
        verify_hf(target)


def test_index_that_lacks_a_tensor_is_a_fault(stored):
    index = json.loads((stored / INDEX).read_text())
    del index["weight_map"][NORM]
    (stored / INDEX).write_text(json.dumps(index))
    (fault,) = verify_hf(stored).faults
    assert fault == f"index: {NORM} is stored in {SECOND} but {INDEX} does not have it"
    k3jax.load_hf(stored)


def test_names_that_no_terminal_shows_are_printed(stored, capsys):
    index = json.loads((stored / INDEX).read_text())
    index["weight_map"]["\ud800"] = SECOND
    (stored / INDEX).write_text(json.dumps(index))
    assert Verify(target=stored).run() == 1
    assert "unknown: '\\ud800'" in capsys.readouterr().out
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(shown):
        assert printable("é\udcff") == "\\xe9\\udcff"


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_non_finite_numbers_are_counted(dtype):
    extremes = [np.finfo(np.float16).max, 0, -0.0, 6e-8, -1]
    numbers = np.array([*extremes, np.nan, np.inf, -np.inf], dtype)
    assert count_non_finite(numbers) == 3
    assert count_non_finite(numbers[:5]) == 0


def test_golden_checkpoint_of_vision_has_no_fault():
    folder = golden_case("vision_small").checkpoint
    assert json.loads((folder / "config.json").read_text())["vision_config"]
    assert verify_hf(folder).faults == ()
