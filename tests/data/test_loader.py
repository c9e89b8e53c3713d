"""Order, restart and sharding of batches."""

import numpy as np
import pytest

from k3jax.data.corpus import Documents
from k3jax.data.loader import Loader
from k3jax.data.mixture import Mixture
from k3jax.data.packing import PackedRows


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return PackedRows(Documents.from_pairs([(str(i), rng.bytes(70)) for i in range(20)]), 32)


def load(source, *, seed=5, **options):
    return Loader(Mixture({"text": source}, {"text": 1.0}, seed), **options)


def take(loader, count):
    return [next(loader) for _ in range(count)]


def same(a, b):
    return all(np.array_equal(x[key], y[key]) for x, y in zip(a, b, strict=True) for key in x)


def test_order_depends_on_the_seed_alone(rows):
    first = take(load(rows, batch=4), 8)
    assert same(first, take(load(rows, batch=4), 8))
    assert not same(first, take(load(rows, batch=4, seed=6), 8))
    assert first[0]["tokens"].shape == (4, 32)
    assert first[0]["tokens"].dtype == np.int32


def test_restart_continues_exactly_also_over_an_epoch(rows):
    loader = load(rows, batch=4)
    take(loader, 7)
    state = loader.get_state()
    rest = take(loader, 2 * len(rows) // 4)
    again = load(rows, batch=4)
    again.set_state(state)
    assert same(rest, take(again, len(rest)))


def test_each_epoch_has_every_row_once_in_a_new_order(rows):
    count = len(rows)
    loader = load(rows, batch=1)
    epochs = [[batch["tokens"].tobytes() for batch in take(loader, count)] for _ in range(2)]
    every = sorted(rows[i]["tokens"].tobytes() for i in range(count))
    assert sorted(epochs[0]) == sorted(epochs[1]) == every
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("own", [[0, 1], [1, 3], [2]])
def test_a_process_loads_its_rows_of_the_same_batches(rows, own):
    whole, part = take(load(rows, batch=4), 30), take(load(rows, batch=4, rows=own), 30)
    for batch, found in zip(whole, part, strict=True):
        np.testing.assert_array_equal(batch["tokens"][own], found["tokens"])
        np.testing.assert_array_equal(batch["segment_ids"][own], found["segment_ids"])


def test_batch_that_does_not_divide_is_refused(rows):
    with pytest.raises(ValueError, match="batch=5 must be divisible by the 2 micro-batches"):
        load(rows, batch=5, micro_batches=2)
