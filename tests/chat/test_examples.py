"""The worked examples, string by string and id by id."""

import pytest

from k3jax import chat
from k3jax.config import presets
from tests.chat.examples import (
    DATA,
    EXAMPLES,
    FIRST_CONTROL,
    PinnedVocabulary,
    learn_segment_ids,
    released_vocabulary,
)

BYTES = chat.ByteVocabulary()


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_has_exactly_its_string(example):
    assert chat.encode(**example["input"]).text == example["text"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_control_ids_stand_exactly_where_the_example_has_them(example):
    encoded = chat.encode(**example["input"])
    ids = encoded.ids(BYTES)
    controls = [token - BYTES.num_ordinary for token in ids if token >= BYTES.num_ordinary]
    released = [token - FIRST_CONTROL for token in example["ids"] if token >= FIRST_CONTROL]
    assert controls == released
    assert BYTES.decode(ids) == example["text"]
    # Where a byte id spells a marker it is typed text.
    spelled = bytes(token for token in ids if token < 256).decode()
    assert ("<|" in spelled) == (example["name"] == "E10")


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_has_its_ids_as_far_as_ids_of_segments_are_known(example):
    vocabulary = PinnedVocabulary(learn_segment_ids())
    assert chat.encode(**example["input"]).ids(vocabulary) == example["ids"]


def test_most_ids_of_the_tags_are_known_without_the_examples():
    learned = learn_segment_ids().keys() - DATA["segment_ids"].keys()
    assert {text for text in learned if len(text) < 8 and not text.isascii()} == {"你好"}
    assert {"python", "x&amp;&quot;y", "search", "plan"} <= learned


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_has_its_ids_with_the_released_file(example):
    vocabulary = released_vocabulary()
    encoded = chat.encode(**example["input"])
    assert encoded.ids(vocabulary) == example["ids"]
    assert vocabulary.decode(example["ids"]) == example["text"]


@pytest.mark.parametrize("case", DATA["texts"], ids=lambda case: case["text"][:12])
def test_ordinary_text_has_its_ids_with_the_released_file(case):
    vocabulary = released_vocabulary()
    assert vocabulary.encode(case["text"]) == case["ids"]
    assert vocabulary.decode(case["ids"]) == case["text"]


def test_targets_of_the_training_example_are_the_last_fifteen_ids():
    example = next(example for example in DATA["examples"] if example["name"] == "E9")
    targets = chat.encode(**example["input"]).targets(PinnedVocabulary(learn_segment_ids()))
    assert targets == [False] * 25 + [True] * 15


def test_examples_are_read_back():
    for example in DATA["examples"]:
        ids = chat.encode(**example["input"]).ids(BYTES)
        read = chat.read_conversation(ids, BYTES)
        given = [m["role"] for m in example["input"]["messages"] if "tools" not in m]
        roles = [
            "assistant" if isinstance(m, chat.AssistantMessage) else m.role
            for m in read.messages
            if getattr(m, "type", None) is None
        ]
        assert roles == given
        assert bool(read.open_turn) == example["input"].get("add_generation_prompt", True)


def test_presets_of_byte_models_name_the_same_control_ids():
    cfg = presets.tiny()
    assert cfg.vocab_size == BYTES.size
    assert cfg.bos_id == BYTES.control_id("[BOS]")
    assert cfg.eos_id == BYTES.end_of_message_id
    assert cfg.pad_id == BYTES.control_id("[PAD]")
    assert cfg.media_placeholder_id == BYTES.media_pad_id
