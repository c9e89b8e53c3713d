"""Saving: whole or not at all, in files that other programs read."""

import dataclasses
import fcntl
import json
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import k3jax
from k3jax.checkpoint import shards
from k3jax.checkpoint.errors import CheckpointError
from k3jax.checkpoint.folder import INDEX
from k3jax.errors import UserError
from tests.golden_cases import golden_case
from tests.released_files import random_tensors, stored_bytes, write_checkpoint
from tests.small_configs import pattern_config, previous_family, randomized, two_layers


@pytest.fixture(scope="module")
def model():
    return k3jax.load_hf(golden_case("mxfp4").checkpoint)


def test_files_index_and_checksums_agree(model, tmp_path):
    target = tmp_path / "new" / "saved"
    k3jax.save_hf(model, target, shard_bytes=100_000)
    index = json.loads((target / INDEX).read_text())
    files = sorted(target.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 3 and all(file.stat().st_size < 130_000 for file in files)
    total = 0
    for file in files:
        tensors = load_file(file)  # the library accepts what we write
        total += sum(tensor.nbytes for tensor in tensors.values())
        assert {index["weight_map"][name] for name in tensors} == {file.name}
    assert index["metadata"]["total_size"] == total
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert all(name.startswith("language_model.") for name in index["weight_map"])
    done = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=target)
    assert done.returncode == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["saved"]


def test_padding_of_the_decay_comes_back(tmp_path):
    """96 heads, stored in 128 entries."""
    cfg = pattern_config("KM", block=1)
    cfg = dataclasses.replace(cfg, kda=dataclasses.replace(cfg.kda, num_heads=96, head_dim=128))
    tensors = random_tensors(cfg)
    decay = tensors["model.layers.0.self_attn.A_log"]
    assert decay.shape == (128,) and not decay[96:].any() and decay[:96].all()
    source = write_checkpoint(tmp_path / "a", cfg, tensors, prefix="language_model.")
    k3jax.save_hf(k3jax.load_hf(source), tmp_path / "b")
    assert stored_bytes(tmp_path / "b") == stored_bytes(source)


@pytest.mark.parametrize("shape", [(2,), (1, 1, 2, 1), (1, 1, 8, 1)])
def test_previous_family_keeps_its_names_and_the_shape_of_its_decay(shape, tmp_path):
    cfg = previous_family()
    tensors = random_tensors(cfg)
    for name in [name for name in tensors if name.endswith("A_log")]:
        values = np.zeros(shape, np.float32)
        values.reshape(-1)[:2] = [0.5, -1]
        tensors[name] = values
    source = write_checkpoint(tmp_path / "a", cfg, tensors)
    k3jax.save_hf(k3jax.load_hf(source), tmp_path / "b")
    assert stored_bytes(tmp_path / "b") == stored_bytes(source)


def test_fresh_model_is_saved_and_loaded(tmp_path):
    model = randomized(two_layers())
    k3jax.save_hf(model, tmp_path / "a", dtype=jnp.bfloat16)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    again = k3jax.load_hf(tmp_path / "a")
    assert again.cfg == model.cfg
    types = {dtype for dtype, _, _ in stored_bytes(tmp_path / "a").values()}
    assert types == {"BF16", "F32"}
    k3jax.save_hf(model, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "float32"


def test_a_taken_folder_is_refused_and_replaced_when_asked(model, tmp_path):
    target = tmp_path / "saved"
    target.mkdir()
    k3jax.save_hf(model, target)  # empty: taken
    before = stored_bytes(target)
    with pytest.raises(UserError, match=r"saved is not empty; .*--overwrite"):
        k3jax.save_hf(model, target)
    k3jax.save_hf(model, target, experts="dequantized", overwrite=True)
    assert stored_bytes(target).keys() != before.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    other = tmp_path / "home"
    other.mkdir()
    (other / "letter.txt").write_text("mine")
    with pytest.raises(UserError, match="neither a checkpoint nor a converted run"):
        k3jax.save_hf(model, other, overwrite=True)
    with (target / ".lock").open("w") as lock:  # as a run that trains holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="saved is in use by another process"):
            k3jax.save_hf(model, target, overwrite=True)
    with pytest.raises(UserError, match=r"letter\.txt is a file"):
        k3jax.save_hf(model, other / "letter.txt")


def test_nothing_is_left_of_a_save_that_failed(model, tmp_path, monkeypatch):
    def full_disk(tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "row_blocks", full_disk)
    with pytest.raises(CheckpointError, match=r"model-00001.*: No space left on device"):
        k3jax.save_hf(model, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(model, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(UserError, match=r"needs 362,208 more bytes, but the disk has 1,000 free"):
        k3jax.save_hf(model, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": "some"}, "experts='some' must be one of"),
        ({"rule": "up", "experts": "packed"}, "rule='up' must be one of floor, even, ceil"),
        ({"shard_bytes": 0}, "shard_bytes=0"),
        ({"dtype": "float64"}, "dtype=float64"),
    ],
)
def test_unknown_choices_are_refused(model, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        k3jax.save_hf(model, tmp_path / "saved", **options)
    assert list(tmp_path.iterdir()) == []


def test_rules_of_the_quantiser_are_selectable(tmp_path):
    """One group with a largest magnitude of 7: floor saturates, the others take the next scale."""
    cfg = pattern_config("KM", block=1, moe_latent_dim=32, moe_expert_hidden_dim=32)
    tensors = random_tensors(cfg)
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    tensors[name] = np.zeros((32, 32), np.float32)
    tensors[name][0, :2] = [7.0, 1.0]
    loaded = k3jax.load_hf(write_checkpoint(tmp_path / "a", cfg, tensors))
    scales = {}
    for rule in ("floor", "even", "ceil"):
        k3jax.save_hf(loaded, tmp_path / rule, experts="packed", rule=rule)
        _, shape, raw = stored_bytes(tmp_path / rule)[f"language_model.{name}_scale"]
        assert shape == (32, 1)
        scales[rule] = raw[0]
    assert scales == {"floor": 127, "even": 128, "ceil": 128}
