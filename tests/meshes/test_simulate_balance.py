"""The simulation of expert exchange adds up what the plans say."""

import json

import numpy as np
import pytest

from experiments.simulate_balance import SimulationConfig, main, share_of_crossings, slots_of
from meshes.balance import Pieces


def test_experts_are_spread_evenly_over_slots():
    slots, num_slots = slots_of(7, 4)
    assert num_slots == 8
    assert slots.tolist() == [0, 1, 2, 3, 4, 5, 6]
    slots, num_slots = slots_of(9, 6)
    assert num_slots == 12
    assert np.bincount(slots // 2, minlength=6).tolist() == [2, 1, 2, 1, 2, 1]
    assert len(set(slots.tolist())) == 9


def test_a_token_crosses_once_to_every_other_node():
    """Four ranks with one expert each, in nodes of two: a token for all of them crosses once."""
    counts = np.full((4, 4), 10)
    expert_start = np.arange(0, 200, 40)
    pieces = Pieces(
        low=np.stack([expert_start[:-1], expert_start[:-1]], 1),
        high=np.stack([expert_start[1:], expert_start[:-1]], 1),
        begin=None,
        sizes=None,
        expert_start=expert_start,
        block_start=expert_start[:-1] + 10 * np.arange(4)[:, None],
        before=None,
        first_fetched=None,
        num_fetched=None,
    )
    random = np.random.default_rng(0)
    everything = np.tile(np.arange(4), (50, 1))
    share = share_of_crossings(everything, counts, pieces, np.array([0, 0, 1, 1]), random)
    assert share == 0.5
    share = share_of_crossings(everything, counts, pieces, np.zeros(4, int), random)
    assert share == 0  # one node: nothing crosses


@pytest.mark.slow
def test_report_of_a_small_simulation(tmp_path, capsys):
    main(SimulationConfig(ranks=(8, 12), node_size=4, tokens=64, output=tmp_path / "out"))
    assert "balanced" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "balance.json").read_text())
    assert (tmp_path / "out" / "balance.png").stat().st_size > 10_000
    for result, own in zip(written["results"], (112, 75), strict=True):
        forms = result["forms"]
        assert result["experts_per_rank"] == own
        assert forms["plain"]["largest_load"] > 1.05
        for name in ("balanced", "hierarchical"):
            assert forms[name]["largest_load"] <= 1 + 1 / (64 * 16) + 1e-9
            assert 0 < forms[name]["redundant_largest"] <= own
        assert forms["plain"]["redundant_largest"] == 0
        slow = [forms[name]["slow_row_gigabytes"] for name in ("balanced", "hierarchical")]
        assert slow[1] < 0.5 * slow[0]


@pytest.mark.parametrize(
    "bad, message", [({"ranks": (12,)}, "multiples of"), ({"chip": "abacus"}, "use one of")]
)
def test_impossible_simulations_are_refused(bad, message):
    with pytest.raises(SystemExit, match=message):
        SimulationConfig(**bad)
