"""Loads of the ranks in records and pictures."""

import json

import matplotlib

matplotlib.use("Agg")

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest

import meshes
from k3jax.data.loader import Loader
from k3jax.ops import ExchangeLoad
from k3jax.train.data import read_data
from k3jax.train.expert_load import load_record, rank_record
from k3jax.train.expert_plots import rank_load_curve, rank_load_map
from k3jax.train.state import ModelParts
from k3jax.train.step import make_train_step
from tests.small_configs import quick_jit
from tests.train.conftest import micro_config, micro_model

# Two layers on four ranks; the second one drops nothing and fetches three experts.
LOAD = ExchangeLoad(
    home_rows=np.array([[8, 4, 2, 2], [16, 0, 0, 0]]),
    rank_rows=np.array([[6, 4, 2, 2], [4, 4, 4, 4]]),
    largest_home_rows=np.array([8, 16]),
    largest_rank_rows=np.array([6, 4]),
    dropped_rows=np.array([2, 0]),
    fetched_experts=np.array([0, 3]),
    fast_bytes=np.array([1e9, 5e8]),
    slow_bytes=np.array([0.0, 2e9]),
)


def test_record_of_a_step():
    record = load_record(LOAD)
    assert json.loads(json.dumps(record)) == {
        "rank_load_before": [2.0, 4.0],
        "rank_load_after": [pytest.approx(6 / 3.5, abs=1e-4), 1.0],
        "dropped_rows": [2, 0],
        "fetched_experts": [0, 3],
        "fast_gigabytes": 1.5,
        "slow_gigabytes": 2.0,
    }


def test_pictures_show_what_was_recorded():
    train = [{"step": step} | load_record(LOAD) for step in (1, 2, 3)]
    figure = rank_load_curve(train)
    before, after = (line.get_ydata() for line in figure.axes[0].get_lines())
    np.testing.assert_allclose(before, [3, 3, 3])
    np.testing.assert_allclose(after, (6 / 3.5 + 1) / 2, atol=1e-4)
    figure = rank_load_map(rank_record(LOAD), [3, 7])
    shown = [axes.get_images()[0].get_array() for axes in figure.axes[:2]]
    np.testing.assert_allclose(shown[0], [[2, 1, 0.5, 0.5], [4, 0, 0, 0]])
    np.testing.assert_allclose(shown[1][1], 1)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["3", "7"]
    plt.close("all")


def test_no_record_where_nothing_travels():
    assert rank_record(None) is None


@pytest.mark.slow
def test_step_on_the_expert_axis_records_its_loads(tmp_path):
    config = micro_config(tmp_path)
    data = read_data(config, micro_model())
    batch = next(Loader(data.mixture, batch=config.batch, micro_batches=1))
    mesh = meshes.build_mesh(meshes.MeshShape(expert=2), jax.devices()[:2])
    with jax.set_mesh(mesh):
        parts = ModelParts(micro_model())
        step, optimizer = make_train_step(parts, config)
        _, metrics = quick_jit(step)(parts.fresh_state(optimizer, 0), batch)
    load = jax.device_get(metrics["exchange_load"])
    rows = int((np.asarray(batch["segment_ids"]) != 0).sum()) * 2  # routes of the one MoE layer
    assert load.home_rows.sum() == load.rank_rows.sum() == rows
    assert np.ptp(load.rank_rows) <= 1  # one exchange: as many rows on either rank
    record = load_record(load)
    assert record["rank_load_before"][0] > record["rank_load_after"][0]
    assert record["rank_load_after"][0] <= 1.01
    assert record["fetched_experts"][0] > 0 and record["dropped_rows"] == [0]
