"""One placeholder per item grows to the item's features."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.errors import UserError
from k3jax.media import IGNORED, bucket_media, grow_placeholders

PAD = 91
GRIDS = np.array([[1, 2, 4], [2, 2, 6]])  # 2 and 3 features


def test_placeholders_become_features_in_order():
    labels = np.array([5, PAD, 7, PAD])
    grown = grow_placeholders([5, PAD, 7, PAD], GRIDS, placeholder_id=PAD, labels=labels)
    assert grown.tokens.tolist() == [5, PAD, PAD, 7, PAD, PAD, PAD]
    assert grown.labels.tolist() == [5, IGNORED, IGNORED, 7, IGNORED, IGNORED, IGNORED]
    assert grown.segment_ids.tolist() == [1] * 7
    assert {array.dtype for array in grown} == {np.dtype(np.int32)}


def test_grids_may_be_those_of_padded_media():
    media = bucket_media(np.zeros((32, 3, 2, 2)), GRIDS[[0, 1]], np.zeros((2, 2)))
    grown = grow_placeholders([[PAD, PAD]], media, placeholder_id=PAD)
    assert grown.tokens.shape == (1, 5)
    assert grown.labels is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_shorter_rows_are_padded_on_the_given_side(side):
    tokens = np.array([[4, PAD, PAD, 6], [8, 9, 10, 11]])
    ids = np.array([[3, 3, 4, 4], [0, 7, 7, 7]])
    grown = grow_placeholders(
        tokens,
        GRIDS,
        placeholder_id=PAD,
        segment_ids=ids,
        labels=tokens,
        pad_side=side,
        pad_id=95,
        length=9,
    )
    rows = {
        "tokens": ([4, PAD, PAD, PAD, PAD, PAD, 6], [8, 9, 10, 11], 95),
        "segment_ids": ([3, 3, 3, 4, 4, 4, 4], [0, 7, 7, 7], 0),
        "labels": ([4, *[IGNORED] * 5, 6], [8, 9, 10, 11], IGNORED),
    }
    for name, (*expected, padding) in rows.items():
        for row, values in zip(getattr(grown, name).tolist(), expected, strict=True):
            fill = [padding] * (9 - len(values))
            assert row == (fill + values if side == "left" else values + fill), name


def test_text_without_placeholder_is_unchanged():
    none = np.zeros((1, 3), int)
    tokens = np.arange(12).reshape(3, 4)
    grown = grow_placeholders(tokens, none, placeholder_id=PAD)
    np.testing.assert_array_equal(grown.tokens, tokens)


def test_mismatches_are_refused():
    with pytest.raises(UserError, match=r"hold 1 placeholders \(id 91\), but media holds 2 items"):
        grow_placeholders([[1, PAD]], GRIDS, placeholder_id=PAD)
    with pytest.raises(UserError, match=r"hold 2 placeholders \(id 91\), but media holds 1 items"):
        grow_placeholders([[PAD, PAD]], GRIDS[:1], placeholder_id=PAD)
    with pytest.raises(UserError, match="row 1 grows to 5 tokens, above length=4"):
        grow_placeholders([[1, 2], [PAD, PAD]], GRIDS, placeholder_id=PAD, length=4)
    with pytest.raises(UserError, match=r"shape \(1, 3\) differs from that of the tokens"):
        grow_placeholders([[PAD, PAD]], GRIDS, placeholder_id=PAD, labels=[[1, 2, 3]])
    with pytest.raises(UserError, match="pad_side='middle' must be 'left' or 'right'"):
        grow_placeholders([[PAD, PAD]], GRIDS, placeholder_id=PAD, pad_side="middle")
    with pytest.raises(UserError, match=r"tokens must be integers \[B, T\], got float64"):
        grow_placeholders([[0.5, PAD]], GRIDS, placeholder_id=PAD)


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=4))
def test_growth_is_the_obvious_loop(rows):
    """Token 0 is the placeholder; item k has k + 1 features."""
    count = sum(row.count(0) for row in rows)
    grids = np.array([[1, 2, 2 * (k + 1)] for k in range(count)] or [[0, 0, 0]])
    grown = grow_placeholders(rows, grids, placeholder_id=0, pad_id=9)
    item, expected = 0, []
    for row in rows:
        out = []
        for token in row:
            out += [0] * (item + 1) if token == 0 else [token]
            item += token == 0
        expected.append(out)
    longest = max(map(len, expected))
    assert grown.tokens.tolist() == [[9] * (longest - len(row)) + row for row in expected]
