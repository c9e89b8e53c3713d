"""Loads of the ranks in records and pictures."""

import json

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from k3jax.ops import ExchangeLoad
from k3jax.train.expert_load import load_record, rank_record
from k3jax.train.expert_plots import rank_load_curve, rank_load_map

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
