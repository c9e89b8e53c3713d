"""Values of odd types, sizes and depths: refused in one short line, or read; never a crash."""

import numpy as np
import pytest

from k3jax import chat
from k3jax.errors import UserError, describe

BYTES = chat.ByteVocabulary()
USER = {"role": "user", "content": "hi"}
HUGE = 10**5000  # more digits than Python prints


def nested(kind: type):
    value = kind()
    for _ in range(100_000):
        value = [value] if kind is list else {"a": value}
    return value


HOSTILE = {"huge": HUGE, "list": nested(list), "dict": nested(dict), "tuple": ([HUGE],)}


class Mute:
    def __repr__(self):
        raise OSError


@pytest.fixture(params=HOSTILE)
def hostile(request):
    return HOSTILE[request.param]


def refusal(*arguments, **options) -> str:
    with pytest.raises(UserError) as raised:
        chat.encode(*arguments, **options)
    assert len(str(raised.value)) < 500
    return str(raised.value)


def function(**fields) -> dict:
    return {"type": "function", "function": {"name": "f", **fields}}


def test_any_value_is_described_shortly(hostile):
    for value in (hostile, Mute(), [Mute()], "x" * 10**6, np.zeros(10**5), {HUGE: HUGE}):
        assert len(describe(value)) <= 160
    assert [describe(value) for value in ("a", 5, None, [1.5], {"a": "b"})] == [
        *("'a'", "5", "None", "[1.5]", "{'a': 'b'}")
    ]


def test_hostile_options_are_refused(hostile):
    assert "tools[0]" in refusal([USER], [hostile])
    assert "tools[0].type" in refusal([USER], [{"type": hostile}])
    assert "tools[0].function" in refusal([USER], [{"type": "function", "function": hostile}])
    assert "function.name" in refusal([USER], [function(name=hostile)])
    assert "description" in refusal([USER], [function(description=hostile)])
    assert "parameters.type" in refusal([USER], [function(parameters={"type": hostile})])
    assert "thinking_effort" in refusal([USER], thinking_effort=hostile)
    assert "response_format" in refusal([USER], response_format={"type": hostile})
    assert "revision" in refusal([USER], revision=hostile)
    if not isinstance(hostile, dict):
        assert "tool_choice" in refusal([USER], tool_choice=hostile)
        assert "response_format" in refusal([USER], response_format=hostile)


def test_hostile_messages_are_refused(hostile):
    def call(**fields):
        return [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, **fields}]}]

    assert "role" in refusal([{"role": hostile}])
    assert "name" in refusal([{**USER, "name": hostile}])
    assert "type" in refusal([{"role": "user", "content": [{"type": hostile}]}])
    assert "text" in refusal([{"role": "user", "content": [{"type": "text", "text": hostile}]}])
    assert "tool_calls[0].id" in refusal(call(id=hostile))
    assert "function" in refusal(call(function=hostile))
    assert "function.name" in refusal(call(function={"name": hostile}))
    assert "arguments" in refusal(call(function={"name": "f", "arguments": {"a": hostile}}))
    assert "keys" in refusal(call(function={"name": "f", "arguments": {HUGE: hostile}}))
    assert "tool_call_id" in refusal([{"role": "tool", "name": "f", "tool_call_id": hostile}])


def test_integers_of_any_size_are_bounds_of_a_schema():
    schema = {"minimum": 10**400, "maximum": -(10**400), "multipleOf": 10**400, "maxItems": 10**400}
    assert str(10**400) in chat.encode([USER], [function(parameters=schema)]).text
    assert "is not JSON" in refusal([USER], [function(parameters={"minimum": HUGE})])
    assert "has the key" in refusal([USER], [function(parameters={"properties": {HUGE: {}}})])
    assert "must be a JSON" in refusal([USER], [function(parameters={"properties": {HUGE: 1}})])


def image(**fields) -> list[dict]:
    return [{"role": "user", "content": [{"type": "image", "image": "a.png", **fields}]}]


@pytest.mark.parametrize(
    "size",
    [(float("inf"), 1), (1, float("nan")), (HUGE, 1), (2**31, 1), (0, 1), "11", 5, (1, 2, 3)],
    ids=range(8),
)
def test_sizes_that_no_image_has_are_refused(size):
    assert "size" in refusal(image(size=size))
    assert "size" in refusal(image(), media_sizes=[size])


def test_sizes_must_be_a_list():
    for sizes in (5, HUGE):
        assert "media_sizes" in refusal(image(), media_sizes=sizes)


def test_addresses_are_unwrapped():
    for kind in ("image_url", "image"):
        part = {"type": kind, kind: {"url": "data:,x", "detail": "low"}, "size": (1, 2)}
        media = chat.encode([{"role": "user", "content": [part]}]).media
        assert [item.source for item in media] == ["data:,x"]
    video = {"type": "video", "video": {"url": "a.mp4"}, "timestamps": ["0"]}
    assert chat.encode([{"role": "user", "content": [video]}]).media[0].source == "a.mp4"


@pytest.mark.parametrize("fields", [{}, {"function": None}, {"function": {"parameters": 5}}])
def test_tools_of_the_server_are_known_by_their_kind(fields):
    tools = [{"type": "web_search", **fields}, function(parameters={"required": ["k"]})]
    chat.encode([USER], tools)
    for name, error in (("web_search", None), ("f", "missing arguments ['k']"), ("g", "unknown")):
        sent = chat.encode(
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": name}}]}],
            thinking=False,
            add_generation_prompt=False,
        ).ids(BYTES)
        body = sent[sent.index(BYTES.end_of_message_id) + 1 :]
        (call,) = chat.parse(body, BYTES, tools=tools, thinking=False).calls
        assert call.error is None if error is None else call.error.startswith(error)


@pytest.mark.parametrize("digits", [5000 * "9", "2147483648", "0", "-1", "\u0663"])
def test_sizes_that_the_encoder_does_not_write_are_malformed(digits):
    ids = chat.encode(image(size=(7, 1)), add_generation_prompt=False).segments
    found: list[int] = []
    for segment in ids:
        text = segment.text.replace("7x1", f"{digits}x1")
        found += [BYTES.control_id(text)] if segment.control else BYTES.encode(text)
    with pytest.raises(UserError, match="described as"):
        chat.read_conversation(found, BYTES)


def test_an_index_that_the_encoder_does_not_write_is_none():
    encoded = chat.encode([{"role": "tool", "name": "f", "content": "x"}], thinking=False)
    for digits, expected in (("1", 1), (5000 * "9", None), ("x", None)):
        ids: list[int] = []
        for segment in encoded.segments:
            text = digits if segment.text == "1" else segment.text
            ids += [BYTES.control_id(text)] if segment.control else BYTES.encode(text)
        assert chat.read_conversation(ids, BYTES).messages[0].index == expected


@pytest.mark.parametrize("ids", [[65, 1.5], [65, "3"], [65, b"3"], [65, None], "3", 5])
def test_ids_are_integers(ids):
    parser = chat.StreamParser(BYTES)
    with pytest.raises(UserError, match="ids must be integers"):
        parser.push(ids)
    assert parser.message().ids == ()
    for read in (BYTES.decode, lambda given: chat.read_conversation(given, BYTES)):
        with pytest.raises(UserError, match="ids must be integers"):
            read(ids)


def test_integers_of_numpy_and_of_any_size_are_ids():
    parser = chat.StreamParser(BYTES)
    parser.push(np.array([65, 66], np.int32))
    parser.push([np.uint8(67), HUGE])
    assert parser.message().reasoning == "ABC" and len(parser.message().errors) == 1
    with pytest.raises(UserError, match="outside the vocabulary"):
        BYTES.decode([HUGE])


def test_dictionaries_keep_an_unusual_index():
    message = chat.AssistantMessage(
        calls=(chat.Call(tool="f", index="7"), chat.Call(tool="f"), chat.Call(tool="f", index=""))
    )
    given = message.to_dict()
    assert [call.get("index") for call in given["tool_calls"]] == ["7", None, ""]
    assert chat.encode([USER, given]).text == chat.encode([USER, message]).text
    given["tool_calls"][0]["index"] = 0  # as servers number the parts of a stream
    assert 'index="1"' in chat.encode([USER, given]).text
