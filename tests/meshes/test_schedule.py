"""The circular schedule, followed step by step with what every stage has in its hands."""

import itertools

import numpy as np
import pytest

from meshes.schedule import Schedule, StageOrder, pipeline_cost

CASES = [(3, 2, 2), (22, 4, 8), (22, 8, 8), (5, 4, 2), (9, 4, 6), (7, 1, 3), (11, 8, 3), (2, 2, 5)]


def entries_of(units, every, before=1):
    """A block begins in every unit whose number divides."""
    return tuple(before + -(-u // every) for u in range(units + 1))


@pytest.mark.parametrize(("units", "stages", "micro_batches"), CASES)
@pytest.mark.parametrize("every", [1, 3])
def test_every_unit_runs_in_order_with_all_it_reads(units, stages, micro_batches, every):
    schedule = Schedule(
        units=units,
        stages=stages,
        micro_batches=micro_batches,
        entries=entries_of(units, every),
    )
    tables = schedule.tables()
    assert tables["holds"].shape == (schedule.steps, stages)
    cached = {(s, m): set() for s, m in itertools.product(range(stages), range(micro_batches))}
    done = dict.fromkeys(range(micro_batches), 0)
    sent = {}  # stage -> (micro-batch, next unit, entries) of the step before
    needed = 0
    for step in range(schedule.steps):
        row = {name: table[step] for name, table in tables.items()}
        arrives, sent = sent, {}
        for stage in np.flatnonzero(row["holds"]):
            m, unit = row["micro_batch"][stage], row["repeat"][stage] * stages + stage
            held = cached[stage, m]
            assert done[m] == unit
            if unit == 0:
                assert row["enters"][stage]
                held |= set(range(schedule.first_entries))
            else:
                assert not row["enters"][stage]
                assert arrives[stage][:2] == (m, unit)
                exist = set(range(schedule.entries_before(unit)))
                needed += 1 + len(exist - held)
                held |= arrives[stage][2]
            assert held == set(range(schedule.entries_before(unit)))
            assert row["works"][stage] == (unit < units)
            held |= set(range(schedule.entries_before(unit + 1)))
            done[m] += 1
            assert row["leaves"][stage] == (done[m] == schedule.padded)
            assert row["returns"][stage] == (unit + stages >= schedule.padded)
            message = range(row["send"][stage], row["send"][stage] + schedule.window)
            sent[(stage + 1) % stages] = (m, unit + 1, held & set(message))
    assert set(done.values()) == {schedule.padded}
    assert row["leaves"][-1]  # no step too many
    known = [len(held) for held in cached.values()]
    assert min(known) == schedule.known_entries and max(known) == schedule.last_entries

    cost = pipeline_cost(units, stages, micro_batches, entries=schedule.entries)
    assert cost.needed_vectors == needed
    assert cost.bubble == pytest.approx(1 - tables["holds"].mean())
    assert cost.waste == pytest.approx(1 - tables["works"].mean())
    assert schedule.busy == pytest.approx(tables["works"].mean())


def test_kimi_k3_sends_new_entries_only():
    # 22 units of four layers from layer 4 on; a block begins every twelve layers.
    entries = tuple(-(-(4 + 4 * u) // 12) for u in range(23))
    costs = {n: pipeline_cost(22, n, 2 * n, entries=entries) for n in (2, 4, 8)}
    assert {n: cost.padded_units for n, cost in costs.items()} == {2: 22, 4: 24, 8: 24}
    # Per micro-batch: hops, and entries made since the stage last held it.
    needed = {n: cost.needed_vectors // (2 * n) for n, cost in costs.items()}
    assert needed == {2: 21 + 8, 4: 23 + 24, 8: 23 + 51}
    assert {n: cost.resend_vectors // (2 * n) for n, cost in costs.items()} == {
        2: 112,
        4: 130,
        8: 130,
    }
    assert {n: cost.window for n, cost in costs.items()} == {2: 1, 4: 2, 8: 3}
    eight = costs[8]
    assert eight.repeats == 3 and eight.steps == 2 * 24 + 7
    assert eight.padding == pytest.approx(2 * 16 / (55 * 8))
    assert eight.bytes_sent(2) == 2 * 2 * (55 * 8 * (1 + 3) + 16 * 7 * (2 + 1 + 2))


def test_storage_order_puts_the_units_of_a_stage_together():
    order = StageOrder(units=5, stages=2)
    np.testing.assert_array_equal(order.order(), [0, 2, 4, 1, 3, 4])
    np.testing.assert_array_equal(order.is_real(), [True] * 5 + [False])
    np.testing.assert_array_equal(order.order()[order.places()], range(5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 0}, "stages=0 must be at least 1"),
        ({"micro_batches": 0}, "micro_batches=0 must be at least 1"),
        ({"entries": (0, 1)}, r"entries=\(0, 1\) must be 4 numbers"),
        ({"entries": (2, 1, 1, 1)}, "do not fall"),
    ],
)
def test_impossible_schedules_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**({"units": 3, "stages": 2, "micro_batches": 2, "entries": (0,) * 4} | changes))


def test_repeats_must_follow_from_units_and_stages():
    with pytest.raises(ValueError, match="repeats=2, but 22 units over 8 stages are 3"):
        pipeline_cost(22, 8, 8, repeats=2)
