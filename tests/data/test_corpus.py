"""Which files are read, how they are split, and what is refused."""

import os
import sysconfig
from pathlib import Path

import pytest

from k3jax.data.corpus import LIBRARY_EXCLUDED, load_corpus
from k3jax.errors import UserError


def write(folder, sizes):
    for name, size in sizes.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((name + " ") * size)
    return str(folder)


def test_library_is_split_by_file_without_tests_and_tables():
    corpus = load_corpus()
    train, held_out = set(corpus.train.names), set(corpus.held_out.names)
    assert not train & held_out
    assert all(not LIBRARY_EXCLUDED & set(Path(name).parts) for name in train | held_out)
    share = corpus.held_out.num_bytes / (corpus.held_out.num_bytes + corpus.train.num_bytes)
    assert 0.05 < share < 0.08
    source = Path(sysconfig.get_path("stdlib")) / corpus.train.names[0]
    assert corpus.train.document(0).tobytes() == source.read_bytes()


def test_split_depends_on_names_and_contents_alone(tmp_path):
    sizes = {f"part/{i}.txt": 20 + i for i in range(40)}
    one = load_corpus(write(tmp_path / "a", sizes))
    two = load_corpus(write(tmp_path / "b", dict(reversed(sizes.items()))))
    assert one.held_out.names == two.held_out.names
    assert one.digest == two.digest
    (tmp_path / "b" / "part" / "3.txt").write_text("other")
    assert load_corpus(str(tmp_path / "b")).digest != one.digest


def test_single_file_holds_out_its_tail_and_says_so(tmp_path):
    corpus = load_corpus(write(tmp_path, {"book.txt": 1000}))
    assert corpus.train.names == ("book.txt",)
    whole = (tmp_path / "book.txt").read_bytes()
    assert corpus.train.text.tobytes() + corpus.held_out.text.tobytes() == whole
    assert "too few files" in corpus.notes[0]


def test_files_that_are_no_text_are_skipped_and_counted(tmp_path):
    write(tmp_path, {f"{i}.txt": 50 for i in range(20)})
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "secret.txt").write_text("secret")
    corpus = load_corpus(str(tmp_path))
    assert len(corpus.train.names) + len(corpus.held_out.names) == 20
    assert corpus.notes == ("files that are not UTF-8 text and were skipped: 1",)


@pytest.mark.parametrize(
    ("name", "message"), [("missing", "does not exist"), ("empty", "no non-empty UTF-8 file")]
)
def test_folder_without_text_is_refused_with_the_way_out(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"{message}.*data.path"):
        load_corpus(str(tmp_path / name))


def test_pipes_and_odd_names_do_no_harm(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (b"a.txt", b"b\xff.txt"):
        with open(os.path.join(os.fsencode(tmp_path), name), "w") as file:
            file.write("some words " * 20)
    (tmp_path / "zero.txt").write_bytes(b"text with a \0 inside")
    corpus = load_corpus(str(tmp_path), held_out_fraction=0.3)
    assert len(corpus.train.names) + len(corpus.held_out.names) == 2
    assert any("not UTF-8 text" in note for note in corpus.notes)
