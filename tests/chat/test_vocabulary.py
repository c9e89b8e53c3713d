"""Vocabularies: control ids, bytes, tiktoken files, merges by rank, hostile and broken text."""

import base64
import builtins
import hashlib
import itertools
import random
import sys

import pytest

from k3jax import chat
from k3jax.chat import bpe
from k3jax.chat.text_stream import TextStream
from k3jax.errors import UserError

MERGES = (
    b"he",
    b"ll",
    b"hell",
    b"hello",
    b" w",
    b"or",
    b" wor",
    b"12",
    b"\xe4\xbd",
    b"aa",
    b"aaa",
    b"\xa0\xe5",
)
RANKS = {bytes([value]): value for value in range(256)}
RANKS |= {token: 256 + rank for rank, token in enumerate(MERGES)}


def small_vocabulary() -> chat.TiktokenVocabulary:
    """256 bytes and a few merges, some of which begin or end inside a character."""
    pytest.importorskip("regex")
    return chat.TiktokenVocabulary(RANKS, merges="python")


def write_ranks(path, ranks=RANKS) -> None:
    lines = (b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    path.write_bytes(b"\n".join(lines) + b"\n")


def test_control_tokens_have_their_released_order():
    names = chat.CONTROL_NAMES
    assert len(names) == len(set(names)) == 256
    assert names[:6] == ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
    assert names[18:22] == (
        "<|media_begin|>",
        "<|media_content|>",
        "<|media_end|>",
        "<|media_pad|>",
    )
    assert names[8] == "<|reserved_token_163592|>"  # the absolute id, in every vocabulary
    assert names[65] == "<osagent_mode>" and names[9] == "[EOT]"
    assert names[-2:] == ("[UNK]", "[PAD]")


@pytest.mark.parametrize("make", [chat.ByteVocabulary, small_vocabulary])
def test_control_ids_follow_the_ordinary_ones(make):
    vocabulary = make()
    assert vocabulary.size == vocabulary.num_ordinary + 256
    for offset, name in enumerate(chat.CONTROL_NAMES):
        token = vocabulary.num_ordinary + offset
        assert vocabulary.control_id(name) == token
        assert vocabulary.control_name(token) == name
        assert vocabulary.decode([token]) == name
    assert vocabulary.control_name(0) is None
    assert vocabulary.control_name(vocabulary.size) is None
    with pytest.raises(UserError, match="no control token is named 'open'"):
        vocabulary.control_id("open")
    with pytest.raises(UserError, match=f"id {vocabulary.size} is outside"):
        vocabulary.decode([vocabulary.size])


@pytest.mark.parametrize("make", [chat.ByteVocabulary, small_vocabulary])
def test_text_comes_back_and_never_becomes_a_control_id(make):
    vocabulary = make()
    texts = ("", "hello world 123", "<|open|>[BOS]<|media_pad|>", "你好\r\n\x00 👩🏽‍🚀", " \n\n x")
    for text in texts:
        ids = vocabulary.encode(text)
        assert all(0 <= token < vocabulary.num_ordinary for token in ids)
        assert vocabulary.decode(ids) == text


@pytest.mark.parametrize("make", [chat.ByteVocabulary, small_vocabulary])
def test_surrogates_become_characters_or_the_replacement(make):
    vocabulary = make()
    assert vocabulary.decode(vocabulary.encode("\ud83d\ude00")) == "😀"
    assert vocabulary.decode(vocabulary.encode("a\ud800b")) == "a\ufffdb"


def test_bytes_that_are_not_utf8_are_replaced_or_kept():
    vocabulary = chat.ByteVocabulary()
    assert vocabulary.decode([97, 0xFF, 98]) == "a\ufffdb"
    assert (
        vocabulary.decode([97, 0xFF, 98], errors="surrogateescape").encode(errors="surrogateescape")
        == b"a\xffb"
    )
    assert vocabulary.token_text(0xFF) is None and vocabulary.token_text(97) == "a"


def test_text_stream_holds_back_parts_of_characters():
    stream = TextStream(chat.ByteVocabulary())
    euro = "€".encode()
    assert [stream.push(token) for token in euro] == [None, None, ("€", tuple(euro))]
    assert stream.flush() is None
    assert stream.push(euro[0]) is None
    assert stream.push(97) == ("\ufffda", (euro[0], 97))
    assert stream.push(euro[0]) is None
    assert stream.flush() == ("\ufffd", (euro[0],))
    assert stream.is_between_characters


def test_text_stream_keeps_what_a_token_begins_of_the_next_character():
    vocabulary = small_vocabulary()
    first, second, *rest = vocabulary.encode("你好")
    assert vocabulary.token_bytes(second) == b"\xa0\xe5"
    events = chat.StreamParser(vocabulary, thinking=False).push([first, second, 97])
    assert [(event.text, event.ids) for event in events] == [
        ("你", (first, second)),
        ("\ufffda", (97,)),
    ]
    events = chat.StreamParser(vocabulary, thinking=False).push([first, second, *rest])
    assert [event.text for event in events] == ["你", "好"]


def test_merges_take_the_lowest_rank_first():
    vocabulary = small_vocabulary()

    def pieces(text):
        return [vocabulary.token_bytes(token) for token in vocabulary.encode(text)]

    assert pieces("hello world") == [b"hello", b" wor", b"l", b"d"]
    assert pieces("aaaa") == [b"aa", b"aa"]  # two of rank "aa", before "aaa" is tried
    assert pieces("aaa") == [b"aaa"]  # a whole piece is one token
    assert pieces("你好")[:1] == [b"\xe4\xbd"]


def lowest_rank_by_search(raw: bytes) -> list[int]:
    """Merges by looking at all pairs each time."""
    if raw in RANKS:
        return [RANKS[raw]]
    parts = [bytes([value]) for value in raw]
    while True:
        ranks = [RANKS.get(a + b, 1 << 30) for a, b in itertools.pairwise(parts)]
        if not ranks or min(ranks) == 1 << 30:
            return [RANKS[part] for part in parts]
        at = ranks.index(min(ranks))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_merges_equal_a_search_over_all_pairs():
    merges = bpe.BytePairMerges(RANKS)
    rng = random.Random(0)
    for _ in range(2000):
        piece = "".join(rng.choices("hello wra12你", k=rng.randint(1, 14)))
        assert list(merges._merge(piece)) == lowest_rank_by_search(piece.encode())


def test_text_is_split_as_released():
    pytest.importorskip("regex")
    cases = {
        "HelloWorld 漢字テスト 12345 it's": "Hello|World| |漢字|テスト| |123|45| it's",
        "  leading and trailing  ": " | leading| and| trailing|  ",
        "line one\nline two\r\nline three": "line| one|\n|line| two|\r\n|line| three",
        "snake_case CamelCase SCREAMING_CASE 007 3.14": (
            "snake|_case| Camel|Case| SCREAMING|_CASE| |007| |3|.|14"
        ),
        "中文汉字とかな mixed": "中文汉字|とかな| mixed",
        "a" + 40 * " " + "b": "a|" + 39 * " " + "| b",
        "I'll DON'T": "I'll| DON'T",
    }
    for text, pieces in cases.items():
        assert bpe.piece_pattern().findall(text) == pieces.split("|")


def test_pattern_covers_every_character():
    pytest.importorskip("regex")
    text = "".join(chr(code) for code in range(0x3100) if not 0xD800 <= code < 0xE000)
    assert "".join(bpe.piece_pattern().findall(text)) == text


def blocks_by_counting(text: str) -> list[str]:
    """The cuts of `guarded_blocks`, one character at a time."""
    blocks = []
    for begin in range(0, len(text), bpe.MAX_BLOCK):
        block, start, length = text[begin : begin + bpe.MAX_BLOCK], 0, 0
        for i, character in enumerate(block):
            same = i > 0 and character.isspace() == block[i - 1].isspace()
            length = length + 1 if same else 1
            if length > bpe.MAX_RUN:
                blocks.append(block[start:i])
                start, length = i, 1
        blocks.append(block[start:])
    return blocks


def test_long_text_is_cut_where_the_released_tokenizer_cuts(monkeypatch):
    monkeypatch.setattr(bpe, "MAX_BLOCK", 40)
    monkeypatch.setattr(bpe, "MAX_RUN", 5)
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("a \n") * rng.randint(1, 13) for _ in range(rng.randint(0, 9)))
        assert list(bpe.guarded_blocks(text)) == blocks_by_counting(text)


def test_hostile_lengths_take_no_quadratic_time():
    vocabulary = small_vocabulary()
    for text in ("a" * 60_000, " " * 60_000, "ha" * 30_000 + " hello"):
        assert vocabulary.decode(vocabulary.encode(text)) == text


def test_both_kinds_of_merges_agree():
    pytest.importorskip("tiktoken")
    python = small_vocabulary()
    other = chat.TiktokenVocabulary(RANKS, merges="tiktoken")
    rng = random.Random(2)
    characters = "hello wra12 \n\r'stLLMé漢テ字ǅ\u0301👍<|>_."
    for _ in range(3000):
        text = "".join(rng.choices(characters, k=rng.randint(0, 40)))
        assert python.encode(text) == other.encode(text)


def test_vocabulary_is_read_from_a_file_or_its_folder(tmp_path):
    pytest.importorskip("regex")
    write_ranks(tmp_path / "tiktoken.model")
    for path in (tmp_path, str(tmp_path / "tiktoken.model")):
        vocabulary = chat.TiktokenVocabulary.from_file(path, allow_other=True, merges="python")
        assert vocabulary.num_ordinary == len(RANKS)
        assert vocabulary.encode("hello") == [RANKS[b"hello"]]


def test_another_digest_is_refused_unless_allowed(tmp_path, monkeypatch):
    pytest.importorskip("regex")
    path = tmp_path / "tiktoken.model"
    write_ranks(path)
    with pytest.raises(UserError, match=r"not the released vocabulary: SHA-256 .*allow_other=True"):
        chat.TiktokenVocabulary.from_file(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr("k3jax.chat.vocabulary.RELEASED_DIGEST", digest)
    assert chat.TiktokenVocabulary.from_file(path, merges="python").num_ordinary == len(RANKS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data + b"!!! 999\n", "line 269: expected base64 and rank"),
        (lambda data: data + b"YWFhYQ==\n", "line 269: expected base64 and rank"),
        (lambda data: data + b"YWE= 268\n", "line 269: .*occurs twice"),
        (lambda data: data + b"YWFhYQ== 300\n", "ranks of 269 tokens are not 0..268"),
        (lambda data: data[: len(data) // 2], "bytes without a token|not 0|expected base64"),
        (lambda data: b"", "bytes without a token"),
    ],
)
def test_broken_files_are_refused_with_the_line(tmp_path, change, message):
    path = tmp_path / "tiktoken.model"
    write_ranks(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=message):
        chat.TiktokenVocabulary.from_file(path, allow_other=True)


def test_missing_file_and_unknown_merges_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the vocabulary .*nothing"):
        chat.TiktokenVocabulary.from_file(tmp_path / "nothing")
    with pytest.raises(UserError, match="merges='fast'"):
        chat.TiktokenVocabulary(RANKS, merges="fast")


@pytest.mark.parametrize("merges", ["python", "tiktoken"])
def test_missing_packages_are_named_with_the_extra(monkeypatch, merges):
    true_import = builtins.__import__

    def no_extras(name, *args, **kwargs):
        if name in ("regex", "tiktoken"):
            raise ImportError(name)
        return true_import(name, *args, **kwargs)

    for name in ("regex", "tiktoken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", no_extras)
    bpe.piece_pattern.cache_clear()
    with pytest.raises(UserError, match=r"install k3jax\[chat\]"):
        chat.TiktokenVocabulary(RANKS, merges=merges)
