"""A whole run on a mesh of eight devices: what it leaves behind, and the curve of one device."""

import dataclasses
import functools
import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from k3jax.train import job
from k3jax.train.health import ReplicaCheck
from k3jax.train.machines import ChecksConfig, MeshConfig
from k3jax.train.metrics import read_metrics
from k3jax.train.placement import Placement
from k3jax.train.restore import load_run
from k3jax.train.stopping import ReplicasDiffer
from tests.meshes.test_replicas import flip
from tests.train.conftest import micro_model


def test_copies_that_differ_stop_a_run_with_the_name_of_the_array():
    placement = Placement(MeshConfig(data=4, fsdp=2), rows=8)
    norm = jax.device_put(np.ones(5, np.float32), placement.everywhere)
    pieces = jax.NamedSharding(placement.mesh, jax.P("fsdp"))
    head = jax.device_put(np.ones((4, 3), np.float32), pieces)
    arrays = {"params.norm": norm, "params.head": head}
    with placement.scope():
        check = ReplicaCheck(placement, arrays)
        check.run(arrays, step=4)
        odd = placement.mesh.devices.flat[3]
        with pytest.raises(ReplicasDiffer, match=r"after step 5.*params\.head on .*3 of process 0"):
            check.run(arrays | {"params.head": flip(head, odd)}, step=5)
    Placement(MeshConfig(), rows=1)  # one device has nothing to compare
    ReplicaCheck(Placement(MeshConfig(), rows=1), {}).run({}, step=1)


@pytest.mark.slow
def test_a_run_on_a_mesh_equals_one_on_one_device(config, tmp_path):
    config = dataclasses.replace(
        config,
        batch=8,
        steps=4,
        length=40,
        checks=ChecksConfig(replicas_every=2, hosts_every=2),
    )
    curves, runs = {}, {}
    for name, mesh in (("one", {}), ("eight", {"fsdp": 2, "expert": 2, "context": 2})):
        given = dataclasses.replace(config, name=name, mesh=MeshConfig(**mesh))
        console = Console(file=io.StringIO(), width=120)
        runs[name] = job.train(given, console)
        records = read_metrics(runs[name].metrics_file)
        curves[name] = [(r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"]
        assert "where the time went" in console.file.getvalue()
    np.testing.assert_allclose(curves["eight"], curves["one"], rtol=1e-4)
    assert {p.name for p in runs["one"].plots.iterdir()} <= {
        p.name for p in runs["eight"].plots.iterdir()
    }
    described = json.loads(runs["eight"].config_file.read_text())
    assert described["environment"]["mesh"] == {
        "stage": 1, "data": 1, "fsdp": 2, "expert": 2, "context": 2, "tensor": 1,
    }  # fmt: skip
    page = runs["eight"].report_file.read_text()
    assert "mesh fsdp 2 x expert 2 x context 2" in page
    assert "model FLOPs utilisation unknown" in page

    # Its checkpoint is a model for one device.
    for a, b in zip(*(jax.tree.leaves(load_run(run.path)) for run in runs.values()), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=3e-3)


@pytest.mark.slow
def test_a_run_in_stages_goes_on_on_one_device(config, tmp_path):
    """Checkpoints are in depth order: four steps in stages, then two on one device."""
    model = micro_model()
    model = dataclasses.replace(
        model, num_layers=4, kda_layers=(1,), full_attention_layers=(2, 3, 4), vision=None
    )
    (tmp_path / "deep.json").write_text(json.dumps(model.to_hf()))
    config = dataclasses.replace(
        config, model=str(tmp_path / "deep.json"), batch=8, steps=4, length=40, remat="full"
    )
    curves, silent = {}, Console(file=io.StringIO(), width=120)
    on_one_device = functools.partial(dataclasses.replace, mesh=MeshConfig(), steps=6)
    for name, mesh in (("one", {}), ("stages", {"stage": 2, "data": 4})):
        run = job.train(dataclasses.replace(config, name=name, mesh=MeshConfig(**mesh)), silent)
        run = job.resume(str(run.path), on_one_device, silent)
        records = read_metrics(run.metrics_file)
        curves[name] = [(r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"]
    assert len(curves["one"]) == 6
    np.testing.assert_allclose(curves["stages"], curves["one"], rtol=1e-4)
