"""Runs and the released layout: weights go both ways, an interrupted conversion continues."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.checkpoint.run import RunCheckpoints, find_damage
from k3jax.errors import UserError
from k3jax.nn.parameters import named_variables
from k3jax.train import converted_writer
from k3jax.train.conversion import convert_hf_to_run, convert_run_to_hf
from k3jax.train.optimizer import adamw
from k3jax.train.restore import load_run
from k3jax.train.run_directory import RunDirectory
from k3jax.train.state import ModelParts, to_tree
from tests.released_files import copy_checkpoint, stored_bytes
from tests.train.conftest import micro_model


@pytest.fixture
def source(tmp_path):
    return copy_checkpoint("mxfp4", tmp_path / "source")


def assert_same_arrays(model, other):
    assert jax.tree.structure(model) == jax.tree.structure(other)
    for (name, a), b in zip(named_variables(model).items(), named_variables(other).values()):
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(np.asarray(a[...]), np.asarray(b[...]), err_msg=name)


def test_released_checkpoint_becomes_a_run_and_comes_back(source, tmp_path, monkeypatch):
    monkeypatch.setattr(converted_writer, "PART_BYTES", 60_000)
    run = tmp_path / "run"
    convert_hf_to_run(source, run)
    assert find_damage(run / "checkpoints" / "0") is None
    assert len(list((run / "checkpoints" / "0" / "weights").iterdir())) > 4
    assert_same_arrays(load_run(run, pytest.fail), k3jax.load_hf(source))
    convert_run_to_hf(run, tmp_path / "back", shard_bytes=100_000)
    assert stored_bytes(tmp_path / "back") == stored_bytes(source)
    described = json.loads((tmp_path / "back" / "config.json").read_text())
    assert described == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize("case", ["text_small", "kimi_linear", "vision_small"])
def test_every_family_comes_back_from_a_run(case, tmp_path):
    source = copy_checkpoint(case, tmp_path / "source")
    convert_hf_to_run(source, tmp_path / "run")
    convert_run_to_hf(tmp_path / "run", tmp_path / "back")
    assert stored_bytes(tmp_path / "back") == stored_bytes(source)


def test_forms_change_on_the_way(source, tmp_path):
    convert_hf_to_run(source, tmp_path / "numbers", experts="dequantized", dtype="float32")
    expected = k3jax.load_hf(source, experts="dequantized", dtype=jnp.float32)
    assert_same_arrays(load_run(tmp_path / "numbers", pytest.fail), expected)
    convert_run_to_hf(tmp_path / "numbers", tmp_path / "a", experts="packed", dtype="bfloat16")
    convert_hf_to_run(source, tmp_path / "packed")
    convert_run_to_hf(tmp_path / "packed", tmp_path / "b", experts="dequantized")
    convert_hf_to_run(tmp_path / "a", tmp_path / "c", experts="dequantized")
    convert_run_to_hf(tmp_path / "c", tmp_path / "d")
    assert stored_bytes(tmp_path / "b") == stored_bytes(tmp_path / "d")


def test_run_of_weights_says_why_it_cannot_be_resumed(source, tmp_path):
    convert_hf_to_run(source, tmp_path / "run")
    with pytest.raises(UserError, match="no optimizer state, data position or schedule"):
        RunDirectory.open(tmp_path / "run")


def test_interrupted_conversion_continues(source, tmp_path, monkeypatch):
    monkeypatch.setattr(converted_writer, "PART_BYTES", 60_000)
    write_part, written = converted_writer.write_part, []

    def write(folder, arrays):
        if len(written) == limit:
            folder.mkdir()
            (folder / "half").write_text("")
            raise KeyboardInterrupt
        written.append(folder.name)
        write_part(folder, arrays)

    monkeypatch.setattr(converted_writer, "write_part", write)
    limit = 3
    with pytest.raises(KeyboardInterrupt):
        convert_hf_to_run(source, tmp_path / "run")
    assert not (tmp_path / "run").exists() and written == ["00000", "00001", "00002"]
    damaged = tmp_path / "run.partial" / "checkpoints" / "0" / "weights" / "00001"
    largest = max((p for p in damaged.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    limit, written[:] = 1000, []
    convert_hf_to_run(source, tmp_path / "run")
    assert written[:2] == ["00001", "00003"]
    assert find_damage(tmp_path / "run" / "checkpoints" / "0") is None
    assert_same_arrays(load_run(tmp_path / "run", pytest.fail), k3jax.load_hf(source))


def test_damaged_weights_are_refused(source, tmp_path):
    convert_hf_to_run(source, tmp_path / "run")
    weights = tmp_path / "run" / "checkpoints" / "0" / "weights"
    largest = max((p for p in weights.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"is damaged .*convert the checkpoint again"):
        load_run(tmp_path / "run", pytest.fail)
    with pytest.raises(UserError, match="is damaged"):
        convert_run_to_hf(tmp_path / "run", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_trained_run_is_written_in_the_released_layout(config, tmp_path):
    model = micro_model()
    run = RunDirectory.create(config, model, corpus={})
    parts = ModelParts(model)
    optimizer = adamw(config.optimizer, parts.param_names)
    state = parts.fresh_state(optimizer, 0)
    checkpoints = RunCheckpoints(run.checkpoints)
    checkpoints.save(4, to_tree(state), {})
    checkpoints.close()
    run.close()
    convert_run_to_hf(run.path, tmp_path / "hf", dtype="bfloat16")
    k3jax.save_hf(parts.join(state.params, state.rest), tmp_path / "saved", dtype="bfloat16")
    assert stored_bytes(tmp_path / "hf") == stored_bytes(tmp_path / "saved")
    assert {dtype for dtype, _, _ in stored_bytes(tmp_path / "hf").values()} == {"BF16", "F32"}
    assert k3jax.load_hf(tmp_path / "hf").cfg == model
