"""Rows hold every byte as a target exactly once."""

import numpy as np
import pytest

from k3jax.data.bytes import BEGIN_OF_DOCUMENT, END_OF_DOCUMENT, decode, encode
from k3jax.data.corpus import Documents
from k3jax.data.packing import PackedRows, held_out_rows


@pytest.fixture
def documents():
    rng = np.random.default_rng(0)
    sizes = [1, 2, 3, 7, 16, 17, 18, 40, 61]
    return Documents.from_pairs([(f"{n}", rng.bytes(n)) for n in sizes])


@pytest.mark.parametrize("length", [2, 3, 17, 64])
def test_every_byte_and_document_end_is_a_target_once(documents, length):
    rows = PackedRows(documents, length, seed=1)
    targets, ends = [], 0
    for index in range(len(rows)):
        tokens, segment_ids = rows[index]["tokens"], rows[index]["segment_ids"]
        same = (segment_ids[1:] == segment_ids[:-1]) & (segment_ids[1:] > 0)
        real = tokens[1:][same]
        ends += int((real == END_OF_DOCUMENT).sum())
        positions = rows.byte_targets(index)
        np.testing.assert_array_equal(real[real < 256], documents.text[positions])
        targets.append(positions)
    assert ends == len(documents.names)
    np.testing.assert_array_equal(np.sort(np.concatenate(targets)), np.arange(documents.num_bytes))


def test_rows_are_full_but_for_the_last_and_segments_count_from_one(documents):
    rows = PackedRows(documents, 17, seed=0)
    for index in range(len(rows)):
        segment_ids = rows[index]["segment_ids"]
        padding = int((segment_ids == 0).sum())
        assert padding <= 1 or index == len(rows) - 1
        assert np.all(segment_ids[len(segment_ids) - padding :] == 0)
        steps = np.diff(segment_ids[: len(segment_ids) - padding])
        assert segment_ids[0] == 1
        assert set(steps.tolist()) <= {0, 1}


def test_continuation_repeats_the_last_token_as_context():
    documents = Documents.from_pairs([("a", bytes(range(10)))])
    rows = PackedRows(documents, 6)
    assert rows[0]["tokens"].tolist() == [BEGIN_OF_DOCUMENT, 0, 1, 2, 3, 4]
    assert rows[1]["tokens"].tolist() == [4, 5, 6, 7, 8, 9]
    assert rows[2]["tokens"].tolist() == [9, END_OF_DOCUMENT, 0, 0, 0, 0]
    assert rows[2]["segment_ids"].tolist() == [1, 1, 0, 0, 0, 0]


def test_plan_depends_on_the_seed_and_samples_nest(documents):
    assert PackedRows(documents, 16, 3).plan == PackedRows(documents, 16, 3).plan
    assert PackedRows(documents, 16, 3).plan != PackedRows(documents, 16, 4).plan
    rows = PackedRows(documents, 16)
    assert held_out_rows(rows, None)[:2] == held_out_rows(rows, 32)
    assert sorted(held_out_rows(rows, None)) == list(range(len(rows)))


def test_bytes_and_text_are_inverse():
    text = "naïve λ\n"
    assert decode(encode(text)) == text
    assert decode([72, BEGIN_OF_DOCUMENT, 105, 255]) == "H<256>i�"
