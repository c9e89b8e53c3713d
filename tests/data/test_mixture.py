"""Shares of several sources of rows."""

import numpy as np
import pytest

from k3jax.data.mixture import PERIOD, Mixture, spread
from k3jax.errors import UserError

SHARES = {"text": 0.7, "pictures": 0.213, "digits": 0.087}


def mixture(shares=SHARES, seed=0):
    sources = {name: list(range(k * 1000, k * 1000 + 11)) for k, name in enumerate(SHARES)}
    return Mixture(sources, shares, seed)


@pytest.mark.parametrize("count", [100, 777, 1000, 4321])
def test_realised_shares_are_never_off_by_more_than_a_row(count):
    mixed = mixture()
    names = [mixed.source_of(row) for row in range(count)]
    for name, share in SHARES.items():
        assert abs(names.count(name) - share * count) <= 1.0, name


def test_every_row_of_a_source_comes_once_in_an_epoch():
    mixed = mixture()
    seen = [mixed[row] for row in range(3000) if mixed.source_of(row) == "digits"]
    assert sorted(seen[:11]) == sorted(seen[11:22]) == list(range(2000, 2011))
    assert seen[:11] != seen[11:22]


def test_order_depends_on_the_seed_and_not_on_what_was_read_before():
    mixed, again = mixture(), mixture()
    rows = [5000, 3, 17, 2999, 0]
    assert [mixed[row] for row in rows] == [again[row] for row in reversed(rows)][::-1]
    other = mixture(seed=1)
    assert [mixed[row] for row in range(50)] != [other[row] for row in range(50)]


@pytest.mark.parametrize("batch", [1, 3, 4, 64, 1500])
def test_bound_on_the_rows_in_a_window_is_reached_and_holds(batch):
    mixed = mixture()
    names = {"pictures", "digits"}
    marked = [mixed.source_of(row) in names for row in range(2 * PERIOD + batch)]
    counts = [sum(marked[at : at + batch]) for at in range(2 * PERIOD)]
    assert max(counts) == mixed.most_in_window(names, batch)


@pytest.mark.parametrize("flagged", range(9))
def test_spread_gives_like_shares_to_every_part(flagged):
    flags = np.arange(8) < flagged
    order = spread(flags)
    assert sorted(order.tolist()) == list(range(8))
    for parts in (1, 2, 4, 8):
        counts = flags[order].reshape(parts, -1).sum(1)
        assert counts.max() <= -(-flagged // parts)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"text": 0.5, "pictures": 0.4}, "sum to 1"),
        ({"text": 1.2, "pictures": -0.2}, "share -0.2 of pictures"),
        ({"text": 0.9995, "pictures": 0.0005}, "steps of 1/1000"),
    ],
)
def test_shares_that_do_not_fit_are_refused(shares, message):
    with pytest.raises(UserError, match=message):
        mixture(shares)
