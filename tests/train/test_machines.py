"""Meshes that fit or not, utilisation, the folder of compiled programs, slow processes."""

import dataclasses

import jax
import numpy as np
import pytest

from k3jax.config import K3Config
from k3jax.errors import UserError
from k3jax.plan import count_flops_per_token
from k3jax.train.compile_cache import default_folder, use_compile_cache
from k3jax.train.config import TrainConfig, check_overrides, from_dict, to_dict
from k3jax.train.health import slow_processes
from k3jax.train.identity import check_identity, what_counts
from k3jax.train.machines import ClusterConfig, MeshConfig, check_mesh, fitting_mesh
from k3jax.train.placement import Placement
from k3jax.train.speed import Speed, peak_flops


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"fsdp": 3}, "--mesh.fsdp 3 has 3 devices, but 8 are here; --mesh.fsdp 8 would fit"),
        (
            {"expert": 2, "tensor": 2},
            "has 4 devices, but 8 are here; --mesh.fsdp 2 --mesh.expert 2 --mesh.tensor 2 would",
        ),
        ({"data": 16}, "has 16 devices, but 8 are here; --mesh.data 8 would fit"),
        ({"tensor": 5, "data": 3}, "has 15 devices, but 8 are here; --mesh.fsdp 8 would fit"),
    ],
)
def test_a_mesh_of_other_devices_is_refused_with_one_that_fits(mesh, message):
    with pytest.raises(UserError) as error:
        Placement(MeshConfig(**mesh), rows=16)
    assert message in str(error.value)


def test_the_mesh_that_is_offered_also_fits_the_rows():
    offered = fitting_mesh(MeshConfig(fsdp=3), 8, rows=4)
    check_mesh(offered, 8, rows=4)
    assert offered == MeshConfig(fsdp=4, context=2)


def test_rows_that_do_not_divide_over_the_mesh():
    with pytest.raises(UserError, match=r"6 rows at a time .* do not divide by the 4 parts"):
        Placement(MeshConfig(fsdp=2, expert=2, context=2), rows=6)
    with pytest.raises(UserError, match=r"mesh\.tensor=0 must be a whole number"):
        MeshConfig(tensor=0)
    with pytest.raises(UserError, match=r"cluster\.heartbeat_seconds=0 must be at least 1"):
        ClusterConfig(heartbeat_seconds=0)


@pytest.mark.parametrize("mesh", [{"fsdp": 4, "context": 2}, {"data": 2, "tensor": 4}])
def test_batches_lie_on_the_mesh_by_rows_and_tokens(mesh):
    placement = Placement(MeshConfig(**mesh), rows=8)
    tokens = np.arange(8 * 6).reshape(8, 6)
    assert placement.own_rows((8, 6)).tolist() == list(range(8))  # all devices are of this process
    placed = placement.put({"tokens": tokens, "media": {"x": np.ones(3)}}, batch=8)
    np.testing.assert_array_equal(np.asarray(placed["tokens"]), tokens)
    parts = {str(shard.index) for shard in placed["tokens"].addressable_shards}
    assert len(parts) == np.prod(list(mesh.values())) / mesh.get("tensor", 1)
    assert placed["media"]["x"].is_fully_replicated
    shapes = placement.abstract({"tokens": jax.ShapeDtypeStruct((2, 6), np.int32)}, batch=8)
    assert shapes["tokens"].shape == (8, 6)
    assert shapes["tokens"].sharding == placed["tokens"].sharding


def test_odd_lengths_and_single_rows_stay_whole():
    placement = Placement(MeshConfig(fsdp=4, context=2), rows=4)
    placed = placement.put({"tokens": np.arange(5).reshape(1, 5)}, batch=1)
    assert placed["tokens"].is_fully_replicated


def test_how_processes_meet_is_not_kept_but_the_mesh_is():
    cluster = ClusterConfig(coordinator="a:1", num_processes=2, process_id=1, heartbeat_seconds=7)
    config = TrainConfig(distributed=True, cluster=cluster, mesh=MeshConfig(fsdp=2))
    kept = from_dict(to_dict(config))
    assert kept.cluster == ClusterConfig(heartbeat_seconds=7)
    assert not kept.distributed and kept.mesh.fsdp == 2


def test_a_run_may_change_its_mesh_but_not_what_it_computes():
    old = TrainConfig(mesh=MeshConfig(fsdp=8))
    new = dataclasses.replace(old, mesh=MeshConfig(data=4), compile_cache="off")
    assert check_overrides(old, new)["mesh.fsdp"] == (8, 1)
    assert what_counts(old) == what_counts(new)
    plain = dataclasses.replace(old.parallel, expert_mode="plain")
    changed = dataclasses.replace(old, parallel=plain)
    with pytest.raises(UserError, match=r"parallel\.expert_mode='plain' differs"):
        check_overrides(old, changed)
    assert what_counts(changed) != what_counts(old)
    # A checkpoint from before there was such an option counts as one with its default.
    stored = what_counts(old)
    del stored["parallel"]
    check_identity({"train": stored}, {"train": what_counts(new)}, "run")
    with pytest.raises(UserError, match=r"train\.parallel\.expert_mode was 'balanced', is 'plain'"):
        check_identity({"train": stored}, {"train": what_counts(changed)}, "run")


def test_utilisation_counts_the_operations_of_the_model(monkeypatch):
    model = K3Config.tiny()
    speed = Speed(model, batch=4, length=64, num_devices=8)
    assert speed.record(2.0, counted=True)["mfu"] is None  # nobody knows the peak of this CPU
    monkeypatch.setattr("k3jax.train.speed.peak_flops", lambda kind: 1e9)
    speed = Speed(model, batch=4, length=64, num_devices=8)
    record = speed.record(2.0, counted=True)
    flops = count_flops_per_token(model, length=64).training * 4 * 64
    assert record["mfu"] == pytest.approx(flops / 2.0 / 8e9)
    assert record["tokens_per_second"] == 128


def test_goodput_leaves_out_what_did_not_count(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    speed = Speed(K3Config.tiny(), batch=1, length=8, num_devices=1)
    now[0] = 110.0  # 10 seconds of compilation and steps
    assert speed.record(2.0, counted=True)["goodput"] == pytest.approx(0.2)
    now[0] = 112.0
    assert speed.record(2.0, counted=False)["goodput"] == pytest.approx(2 / 12)


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("TPU v5 lite", 197), ("TPU v5", 459), ("TPU v5p", 459), ("TPU v6 lite", 918),
        ("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("TPU7x", 2307 / 2),
    ],
)  # fmt: skip
def test_peaks_by_the_names_that_devices_have(kind, tera):
    assert peak_flops(kind) == pytest.approx(tera * 1e12)
    assert peak_flops("cpu") is None


@pytest.fixture
def cache_setting():
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_compiled_programs_go_where_they_are_wanted(cache_setting, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "told"))
    assert use_compile_cache(None) == tmp_path / "told"
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert use_compile_cache(None) is None
    monkeypatch.delenv("XLA_FLAGS")
    assert use_compile_cache(None) == default_folder() == tmp_path / "cache" / "k3jax" / "compiled"
    assert use_compile_cache(str(tmp_path / "own")) == tmp_path / "own"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert use_compile_cache("off") is None and jax.config.jax_compilation_cache_dir is None
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"compile_cache=.*file.*name another folder"):
        use_compile_cache(str(tmp_path / "file"))


def test_the_process_that_stands_out_is_named():
    columns = {
        "step_seconds": (1.0, 1.0, 1.0),
        "data_seconds": (0.001, 0.3, 0.002),
        "probe_seconds": (0.010, 0.010, 0.017),
    }
    data, probe = slow_processes(columns)
    assert data.startswith("process 1 waits for its data 0.3000 s")
    assert probe.startswith("process 2 computes a product of its own 0.0170 s, 1.7 times")
    hidden = columns | {"data_seconds": (0.001, 0.015, 0.001), "probe_seconds": (0.01,) * 3}
    assert slow_processes(hidden) == []  # data that comes while a step runs costs nothing
