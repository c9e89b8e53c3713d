"""Pictures of words, packed into rows."""

import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from k3jax.data import bytes as vocabulary
from k3jax.data.corpus import load_corpus
from k3jax.data.loader import Loader
from k3jax.data.mixture import Mixture
from k3jax.data.packing import PackedRows
from k3jax.data.picture_rows import PictureRows
from k3jax.data.pictures import SIZE, Digits, TextPictures, draw, split_words
from k3jax.errors import UserError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("the_word is a snippet, of 12 code tokens; overlong_words left")
    (folder / "b.txt").write_text("def code(self): return snippet" + 3 * " some text to train on")
    return load_corpus(str(folder), held_out_fraction=0.3)


@pytest.fixture(scope="module")
def rows(corpus):
    return PictureRows(TextPictures(split_words(corpus, 0.1)[0]), length=80, patch_size=14)


def test_words_are_distinct_whole_and_short_and_split(corpus):
    shown, unseen = split_words(corpus, 0.3)
    words = shown + unseen
    assert len(set(words)) == len(words) and unseen
    assert {"the_word", "snippet", "code", "self", "def", "left"} <= set(words)
    assert not {"is", "12", "overlong"} & set(words)
    assert split_words(corpus, 0.3) == (shown, unseen)


def test_every_character_shows_in_its_own_cell():
    empty = np.asarray(draw(""))
    for i, character in enumerate("aZ_g9|"):
        cells = np.asarray(draw(" " * i + character)) != empty
        columns = np.flatnonzero(cells.any(axis=(0, 2)))
        assert columns.size and columns.min() >= 28 * i and columns.max() < 28 * (i + 1)
    assert draw("x").size == SIZE


def test_rows_hold_whole_pairs(rows):
    seen = []
    for index in range(len(rows)):
        row = rows[index]
        count = row["segment_ids"].max()
        assert len(row["grids"]) == len(row["sizes"]) == count <= rows.most_pictures
        assert len(row["patches"]) == count * rows.patches_per_picture == row["grids"].prod(1).sum()
        for number in range(1, count + 1):
            tokens = row["tokens"][row["segment_ids"] == number]
            assert (tokens == vocabulary.MEDIA_PAD).sum() == rows.patches_per_picture // 4
            assert tokens[0] == vocabulary.BEGIN_OF_DOCUMENT
            assert tokens[-1] == vocabulary.END_OF_DOCUMENT
            answer = row["tokens"][row["answers"] & (row["segment_ids"] == number)]
            seen.append(vocabulary.decode(answer))
            begin = tokens.tolist().index(vocabulary.MEDIA_BEGIN)
            assert vocabulary.decode(tokens[begin + 1 : begin + 13]) == "image 224x28"
    assert sorted(seen) == sorted(rows.pairs.words)


def test_batches_hold_the_pictures_of_their_rows_in_order(rows, corpus):
    text = PackedRows(corpus.train, length=80)
    mixture = Mixture({"text": text, "pictures": rows}, {"text": 0.5, "pictures": 0.5}, seed=3)
    whole = next(Loader(mixture, batch=4))
    parts = [next(Loader(mixture, batch=4, rows=own)) for own in ([0, 1], [2, 3])]
    assert Loader(mixture, batch=4).batches.count_rows(0) == {"rows": 4, "picture_rows": 2}
    for name in ("tokens", "segment_ids"):
        np.testing.assert_array_equal(whole[name], np.concatenate([p[name] for p in parts]))
    placeholders = (whole["tokens"] == vocabulary.MEDIA_PAD).sum()
    assert placeholders == whole["media"].num_features.sum() > 0
    assert whole["media"].grids.prod(1).sum() <= len(whole["media"].patches)
    for part in parts:  # a process holds the pictures of all rows
        jax.tree.map(np.testing.assert_array_equal, part["media"], whole["media"])
    halves = next(Loader(mixture, batch=4, micro_batches=2))
    np.testing.assert_array_equal(halves["tokens"], whole["tokens"])
    blocks = halves["media"].patches.reshape(2, -1, 3, 14, 14)
    for block, rows_of_block in zip(blocks, (whole["tokens"][:2], whole["tokens"][2:])):
        num_patches = 4 * (rows_of_block == vocabulary.MEDIA_PAD).sum()
        assert block[:num_patches].any(axis=(1, 2, 3)).all() and not block[num_patches:].any()
    shapes = Loader(mixture, batch=4).shapes()
    assert shapes["media"].patches.shape == whole["media"].patches.shape


def test_rows_that_a_pair_does_not_fit_are_refused():
    with pytest.raises(UserError, match="length=20 is shorter than a picture with its text"):
        PictureRows(TextPictures(["word"]), length=20, patch_size=14)


def test_a_text_without_words_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("1 2 3 45 " * 20)
    with pytest.raises(UserError, match="0 words of 3 to 8 letters"):
        split_words(load_corpus(str(tmp_path)), 0.1)


def test_digits_come_from_scikit_learn_or_say_so(monkeypatch):
    values = np.arange(20)
    images = np.zeros((20, 8, 8)) + 16 * (np.arange(8) == 3)  # one dark column

    class Module:
        @staticmethod
        def load_digits():
            return SimpleNamespace(images=images, target=values % 10)

    monkeypatch.setitem(sys.modules, "sklearn", Module)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", Module)
    train, held_out = Digits(), Digits(held_out=True)
    assert (len(train), len(held_out)) == (18, 2)
    assert [pair.text for pair in held_out] == ["8", "9"]
    shown = np.asarray(train[0].image)
    assert shown.shape == (28, 28, 3)
    assert shown[:, 12].max() < 30 and shown[:, 20:].min() > 240  # ink is dark
    rows = PictureRows(train, length=64, patch_size=14)
    assert rows[0]["grids"].tolist()[0] == [1, 2, 2]
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"pip install 'k3jax\[digits\]', or --data.digits 0"):
        Digits()


def test_words_of_other_scripts_are_drawn_whole(tmp_path):
    (tmp_path / "a.txt").write_text("schön слово λόγος naïve 漢字漢字 " * 9, encoding="utf-8")
    shown, unseen = split_words(load_corpus(str(tmp_path)), 0.3)
    assert set(shown) | set(unseen) == {"schön", "слово", "λόγος", "naïve"}
    rows = PictureRows(TextPictures(shown + unseen), length=64, patch_size=14)
    row = rows[0]
    assert vocabulary.decode(row["tokens"][row["answers"] & (row["segment_ids"] == 1)]) in shown
