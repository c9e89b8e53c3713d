"""Conversion between released folders: continued after an interruption, in little memory."""

import json
import tracemalloc

import jax
import numpy as np
import pytest

from k3jax.checkpoint import save, shards, tensors
from k3jax.checkpoint.convert import convert_hf
from k3jax.checkpoint.hf import load_hf
from k3jax.checkpoint.target import JOURNAL
from k3jax.errors import UserError
from tests.released_files import copy_checkpoint, random_tensors, stored_bytes, write_checkpoint
from tests.small_configs import pattern_config

SHARD_BYTES = 60_000


@pytest.fixture
def source(tmp_path):
    return copy_checkpoint("mxfp4", tmp_path / "source")


class Interrupted(BaseException):
    """Stands for Ctrl-C or a lost machine."""


def interrupt_after(monkeypatch, count):
    """Let `count` shards be written, the next one half; returns the names of those written."""
    original, written = shards.write_shard, []

    def write(folder, shard, progress, stop):
        if len(written) == count:
            (folder / shard.name).write_bytes(b"half")
            raise Interrupted
        written.append(shard.name)
        return original(folder, shard, progress, stop)

    monkeypatch.setattr(save, "write_shard", write)
    monkeypatch.setattr(save, "WRITERS", 1)
    return written


def test_interrupted_conversion_continues(source, tmp_path, monkeypatch):
    target, partial = tmp_path / "target", tmp_path / "target.partial"
    first = interrupt_after(monkeypatch, 3)
    with pytest.raises(Interrupted):
        convert_hf(source, target, shard_bytes=SHARD_BYTES)
    assert not target.exists() and len(first) == 3
    kept = {name: (partial / name).stat().st_mtime_ns for name in first}
    # One of the complete files is damaged meanwhile: it is written again.
    damaged = first[1]
    content = bytearray((partial / damaged).read_bytes())
    content[-1] ^= 1
    (partial / damaged).write_bytes(content)
    (partial / "left.tmp").write_text("rest of an interrupted write")

    second = interrupt_after(monkeypatch, 1000)
    reports = []
    convert_hf(source, target, shard_bytes=SHARD_BYTES, progress=lambda *r: reports.append(r))
    assert set(second) & set(first) == {damaged}
    for name in {*first} - {damaged}:
        assert (target / name).stat().st_mtime_ns == kept[name]
    assert stored_bytes(target) == stored_bytes(source)
    assert not partial.exists() and not (target / "left.tmp").exists()
    assert not (target / JOURNAL).exists()
    assert 0 < reports[0][0] < reports[0][1] == 362_208  # what was there counts as done


@pytest.mark.parametrize("change", ["options", "source"])
def test_another_conversion_starts_anew(source, tmp_path, monkeypatch, change):
    target = tmp_path / "target"
    first = interrupt_after(monkeypatch, 3)
    with pytest.raises(Interrupted):
        convert_hf(source, target, shard_bytes=SHARD_BYTES)
    second = interrupt_after(monkeypatch, 1000)
    options = {"shard_bytes": SHARD_BYTES}
    if change == "options":
        options["experts"] = "dequantized"
    else:
        file = next(source.glob("model-00001*"))
        file.write_bytes(file.read_bytes())
    convert_hf(source, target, **options)
    assert set(first) <= set(second) or change == "options"
    assert load_hf(target).cfg == load_hf(source).cfg


def test_other_files_come_along(source, tmp_path):
    (source / "tiktoken.model").write_bytes(b"\0vocabulary")
    convert_hf(source, tmp_path / "target")
    assert (tmp_path / "target" / "tiktoken.model").read_bytes() == b"\0vocabulary"
    assert "tiktoken.model" in (tmp_path / "target" / "SHA256SUMS").read_text()


def test_folders_inside_each_other_are_refused(source):
    for target in (source, source / "inside", source.parent):
        with pytest.raises(UserError, match="must not contain each other"):
            convert_hf(source, target, overwrite=True)


def test_a_folder_in_the_way_is_not_deleted(source, tmp_path):
    (tmp_path / "target.partial").mkdir()
    (tmp_path / "target.partial" / "letter.txt").write_text("mine")
    with pytest.raises(UserError, match="in the way: it was not written by k3jax"):
        convert_hf(source, tmp_path / "target")
    assert (tmp_path / "target.partial" / "letter.txt").read_text() == "mine"


def test_dtype_applies_to_what_the_release_stores_in_bfloat16(source, tmp_path):
    convert_hf(source, tmp_path / "wide", dtype="float32")
    wide, stored = stored_bytes(tmp_path / "wide"), stored_bytes(source)
    for name, (dtype, shape, raw) in stored.items():
        if dtype == "BF16":
            bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
            assert wide[name] == ("F32", shape, bits.tobytes())
        else:
            assert wide[name] == (dtype, shape, raw)
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "float32"


def test_memory_does_not_grow_with_the_checkpoint(tmp_path, monkeypatch):
    """Conversion holds blocks, loading one variable besides the arrays."""
    cfg = pattern_config(
        "KMMMM", block=2, moe_num_experts=64, moe_latent_dim=64, moe_expert_hidden_dim=96
    )
    folder = write_checkpoint(tmp_path / "a", cfg, random_tensors(cfg), shards=8)
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1 << 16)
    convert_hf(folder, tmp_path / "warm")  # imports and caches

    def peak(function):
        tracemalloc.start()
        result = function()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found, result

    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    largest_file = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size > 6e6
    added, _ = peak(lambda: convert_hf(folder, tmp_path / "b", shard_bytes=1_000_000))
    assert added < size / 3
    added, model = peak(lambda: load_hf(folder))
    variables = [leaf.nbytes for leaf in jax.tree.leaves(model)]
    assert added - sum(variables) < max(variables) + 2 * largest_file
