"""The worked examples of the format: inputs, exact strings, ids of the released vocabulary."""

import json
import os
from pathlib import Path

import pytest

from k3jax import chat

DATA = json.loads((Path(__file__).parent / "xtml_examples.json").read_text(encoding="utf-8"))
EXAMPLES = [pytest.param(example, id=example["name"]) for example in DATA["examples"]]
FIRST_CONTROL = 163_584


def released_vocabulary() -> chat.TiktokenVocabulary:
    """The released vocabulary, from the file named by K3JAX_TIKTOKEN; skips without it."""
    path = os.environ.get("K3JAX_TIKTOKEN")
    if not path:
        pytest.skip("K3JAX_TIKTOKEN does not name the released tiktoken.model")
    return chat.TiktokenVocabulary.from_file(path)


class PinnedVocabulary(chat.Vocabulary):
    """The released ids of those segments alone whose ids are known, without the file."""

    def __init__(self, segment_ids: dict[str, list[int]]):
        super().__init__([b""] * FIRST_CONTROL)
        self.segment_ids = segment_ids

    def encode(self, text: str) -> list[int]:
        return self.segment_ids[text]


def runs_between_controls(segments, ids) -> list[tuple[list[str], list[int]]]:
    """Texts and ids of each stretch without control tokens."""
    texts, numbers = [[]], [[]]
    for segment in segments:
        if segment.control:
            texts.append([])
        else:
            texts[-1].append(segment.text)
    for token in ids:
        if token >= FIRST_CONTROL:
            numbers.append([])
        else:
            numbers[-1].append(token)
    assert len(texts) == len(numbers)
    return list(zip(texts, numbers))


def learn_segment_ids() -> dict[str, list[int]]:
    """Ids of segments: known ones, and those that stand alone among known ones in an example.

    Raises:
        AssertionError: the same text has other ids in another place.
    """
    known = {text: list(ids) for text, ids in DATA["segment_ids"].items()}
    runs = [
        run
        for example in DATA["examples"]
        for run in runs_between_controls(chat.encode(**example["input"]).segments, example["ids"])
    ]
    for texts, ids in sorted(runs, key=lambda run: len(run[0])):
        unknown = [text for text in texts if text not in known]
        if not texts or len(unknown) != 1:
            continue
        at = texts.index(unknown[0])
        before = sum(len(known[text]) for text in texts[:at])
        after = sum(len(known[text]) for text in texts[at + 1 :])
        known[unknown[0]] = ids[before : len(ids) - after]
    return known
