"""The rules of the encoder that the worked examples leave open."""

import json

import pytest

from k3jax import chat
from k3jax.errors import UserError

BYTES = chat.ByteVocabulary()
END = "<|close|>message<|sep|><|end_of_msg|>"


def render(*messages, **options) -> str:
    """The text of `messages` alone."""
    options = {"thinking_effort": None, "add_generation_prompt": False, **options}
    return chat.encode(list(messages), **options).text


def call(arguments, name="f", call_id=None) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls, content="", **fields) -> dict:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


def arguments_of(arguments, revision="newest") -> str:
    """What stands inside the call of a single message."""
    text = render(assistant(call(arguments)), revision=revision)
    start = text.index('index="1"<|sep|>') + len('index="1"<|sep|>')
    return text[start : text.rindex("<|close|>call<|sep|>")]


def argument(key, kind, body) -> str:
    opener = f'<|open|>argument key="{key}" type="{kind}"<|sep|>'
    return f"{opener}{body}<|close|>argument<|sep|>"


def raw(body) -> str:
    return f'<|open|>json type="object"<|sep|>{body}<|close|>json<|sep|>'


def test_tags_and_bodies_are_cut_into_segments():
    encoded = chat.encode(
        [{"role": "user", "name": 'a"&', "content": "hi"}],
        thinking=False,
        add_generation_prompt=False,
    )
    assert [segment.text for segment in encoded.segments] == [
        *("<|open|>", "message", " role", '="', "user", '"'),
        *(" name", '="', "a&quot;&amp;", '"', "<|sep|>"),
        *("hi", "<|close|>", "message", "<|sep|>", "<|end_of_msg|>"),
    ]
    assert not any(segment.target for segment in encoded.segments)


def test_parts_of_content_are_segments_of_their_own():
    parts = [{"type": "text", "text": "first "}, {"type": "text", "text": "second"}]
    encoded = chat.encode([{"role": "user", "content": parts}], thinking_effort=None)
    texts = [segment.text for segment in encoded.segments]
    assert texts[7:9] == ["first ", "second"]


def test_developer_is_written_as_system():
    assert render({"role": "developer", "content": "x"}) == render(
        {"role": "system", "content": "x"}
    )


@pytest.mark.parametrize("content", [None, "", []])
def test_empty_content_leaves_an_empty_body(content):
    assert (
        render({"role": "user", "content": content}) == f'<|open|>message role="user"<|sep|>{END}'
    )
    assert render({"role": "assistant", "content": content}) == (
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|><|close|>think<|sep|>'
        f"<|open|>response<|sep|><|close|>response<|sep|>{END}"
    )


def test_reasoning_of_earlier_turns_is_kept_and_left_out_without_thinking():
    turn = assistant(content="b", reasoning="a", name="bot")
    kept = render(turn, {"role": "user", "content": "c"}, turn)
    assert kept.count("<|open|>think<|sep|>a<|close|>think<|sep|>") == 2
    assert kept.count('role="assistant" name="bot"') == 2
    assert "think" not in render(turn, thinking=False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_content": "a", "reasoning": "b"}, "a"),
        ({"reasoning_content": "", "reasoning": "b"}, "b"),
        ({"reasoning_content": None, "reasoning": None}, ""),
        ({"reasoning_content": " \n"}, " \n"),
    ],
)
def test_first_reasoning_that_is_not_empty_counts(fields, expected):
    assert f"<|open|>think<|sep|>{expected}<|close|>think" in render(assistant(**fields))


def test_bodies_are_neither_escaped_nor_trimmed():
    words = ' \n& "<|close|>message<|sep|>&amp; \n'
    assert render({"role": "user", "content": words}) == (
        f'<|open|>message role="user"<|sep|>{words}{END}'
    )


@pytest.mark.parametrize(
    ("given", "newest", "older"),
    [
        (None, "", ""),
        ("", "", ""),
        ("{}", "", ""),
        (" {\n} ", "", ""),
        ('{"n": 1e2}', argument("n", "number", "1e2"), argument("n", "number", "100.0")),
        ('{"n":-0}', argument("n", "number", "-0"), argument("n", "number", "0")),
        ('{"n":1E400}', argument("n", "number", "1E400"), argument("n", "number", "Infinity")),
        ('{"o":{"t":1}}', argument("o", "object", '{"t":1}'), argument("o", "object", '{"t": 1}')),
        ('{"l":[1,2]}', argument("l", "array", "[1,2]"), argument("l", "array", "[1, 2]")),
        ('{"é":"\\u00e9\\n"}', argument("é", "string", "é\n"), argument("é", "string", "é\n")),
        (
            '{"a":true,"a":null}',
            argument("a", "boolean", "true") + argument("a", "null", "null"),
            argument("a", "null", "null"),
        ),
        ("not json", raw("not json"), raw("not json")),
        ('{"a": 1,}', raw('{"a": 1,}'), raw('{"a": 1,}')),
        ('{"a": 1', raw('{"a": 1'), raw('{"a": 1')),
        ('{"a":"\n"}', argument("a", "string", "\n"), raw('{"a":"\n"}')),
        (" \t", raw(" \t"), ""),
        ("[1]", raw("[1]"), None),
        ('"a"', raw('"a"'), None),
        ('{"a":1} tail', argument("a", "number", "1"), None),
        (
            {"l": [1, 2], "s": "x"},
            *(2 * [argument("l", "array", "[1, 2]") + argument("s", "string", "x")]),
        ),
        (
            {"o": {"é": 1}, "f": 1e2},
            *(2 * [argument("o", "object", '{"é": 1}') + argument("f", "number", "100.0")]),
        ),
    ],
)
def test_arguments_are_written_as_each_revision_does(given, newest, older):
    assert arguments_of(given) == newest
    if older is None:
        with pytest.raises(UserError, match=r"messages\[0\].tool_calls\[0\].function.arguments"):
            arguments_of(given, "older")
    else:
        assert arguments_of(given, "older") == older


def test_older_revision_drops_blank_reasoning():
    turn = assistant(reasoning_content=" \n")
    assert "<|open|>think<|sep|> \n<|close|>" in render(turn)
    assert "<|open|>think<|sep|><|close|>" in render(turn, revision="older")


def test_hostile_arguments_are_written_and_not_converted():
    digits = "9" * 10_000
    assert arguments_of(f'{{"n": {digits}}}') == argument("n", "number", digits)
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert arguments_of(deep) == raw(deep)
    assert arguments_of(deep, "older") == raw(deep)
    assert arguments_of('{"s": "\\ud800"}') == argument("s", "string", "\ud800")
    ids = chat.encode([assistant(call('{"s": "\\ud800"}'))]).ids(BYTES)
    assert "\ufffd" in BYTES.decode(ids)


def test_call_without_the_wrapper_function_is_read():
    flat = {"id": "a", "name": "f", "arguments": {"x": 1}}
    assert render(assistant(flat)) == render(assistant(call({"x": 1}, call_id="a")))


def tool_lines(text) -> list[str]:
    pieces = text.split('<|open|>message role="tool" ')[1:]
    return [piece.split(END)[0].replace("<|sep|>", ": ") for piece in pieces]


def result(content, call_id=None, **fields) -> dict:
    return {"role": "tool", "content": content, "tool_call_id": call_id, **fields}


def test_results_are_put_in_the_order_of_the_calls():
    turn = assistant(call(None, "f", "x"), call(None, "g", "y"), call(None, "h", "x"))
    got = tool_lines(render(turn, result("2", "y", name="other"), result("1", "x")))
    # Of equal ids the first call counts; the name is that of the call.
    assert got == ['tool="f" index="1": 1', 'tool="g" index="2": 2']


def test_a_run_with_an_unknown_id_keeps_its_order_and_its_own_names():
    turn = assistant(call(None, "f", "x"), call(None, "g", "y"))
    got = tool_lines(
        render(turn, result("2", "y"), result("?", "z", tool="t"), result("1", "x", name="n"))
    )
    assert got == ['tool="f" index="1": 2', 'tool="t" index="2": ?', 'tool="n" index="3": 1']


def test_results_are_counted_past_user_messages():
    turn = assistant(call(None, "f", "x"), call(None, "g", "y"))
    user = {"role": "user", "content": "u"}
    got = tool_lines(render(turn, result("1", "x"), user, result("2", "y"), turn, result("1")))
    assert got == ['tool="f" index="1": 1', 'tool="g" index="2": 2', 'tool="f" index="1": 1']


def test_result_of_no_call_needs_a_name():
    assert tool_lines(render(result("a", name="n"))) == ['tool="n" index="1": a']
    with pytest.raises(UserError, match=r"messages\[1\] is the result of no known call"):
        render({"role": "user", "content": "u"}, result("a"))


def image(**fields) -> dict:
    return {"type": "image", **fields}


def test_images_are_one_placeholder_with_their_size():
    parts = [
        {"type": "text", "text": "<|media_pad|><|kimi_image_placeholder|>"},
        image(size=(640, 480), image="a.png"),
        {"type": "image_url", "image_url": {"url": "data:"}, "size": [1, 2]},
    ]
    encoded = chat.encode([{"role": "user", "content": parts}], thinking_effort=None)
    body = encoded.text.split("<|sep|>")[1]
    prompt = "<|media_begin|>image {}<|media_content|><|media_pad|><|media_end|>"
    assert body.startswith(parts[0]["text"] + prompt.format("640x480") + prompt.format("1x2"))
    ids = encoded.ids(BYTES)
    assert ids.count(BYTES.media_pad_id) == 2  # what the user typed is none
    assert [(item.size, item.source) for item in encoded.media] == [
        ((640, 480), "a.png"),
        ((1, 2), "data:"),
    ]
    read = chat.read_conversation(ids, BYTES).messages[0].content
    assert read == (parts[0]["text"], *(chat.MediaItem(size=item.size) for item in encoded.media))


def test_sizes_come_from_the_part_the_picture_or_the_list():
    class Picture:
        size = (30, 20)

    def sizes(*parts, **options):
        return [
            item.size for item in chat.encode([{"role": "user", "content": parts}], **options).media
        ]

    assert sizes(image(image=Picture())) == [(30, 20)]
    assert sizes(image(), image(size=(1, 1)), image(), media_sizes=[[5, 6], [7, 8]]) == [
        (5, 6),
        (1, 1),
        (7, 8),
    ]
    with pytest.raises(UserError, match=r"messages\[0\].content\[0\] has no size; add 'size'"):
        sizes(image())
    with pytest.raises(UserError, match=r"content\[1\] has no size: media_sizes holds only 1"):
        sizes(image(), image(), media_sizes=[(5, 6)])
    with pytest.raises(UserError, match="media_sizes holds 2 sizes, but 1 images need one"):
        sizes(image(), media_sizes=[(5, 6), (7, 8)])
    for size in ((0, 1), (1.5, 1), 7, "ab", (1, 2, 3)):
        with pytest.raises(UserError, match=r"size .* must be"):
            sizes(image(size=size))


def test_video_is_a_placeholder_for_each_chunk_after_its_time():
    part = {"type": "video", "timestamps": ["0s", "1s"], "video": "v"}
    encoded = chat.encode([{"role": "user", "content": [part]}], thinking_effort=None)
    chunk = "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
    assert f"0s{chunk}1s{chunk}<|close|>" in encoded.text
    read = chat.read_conversation(encoded.ids(BYTES), BYTES).messages[0].content
    assert [item.timestamp for item in read] == ["0s", "1s"]
    with pytest.raises(UserError, match=r"content\[0\] is a video.*timestamps"):
        chat.encode([{"role": "user", "content": [{"type": "video"}]}])


def test_options_stand_around_the_messages_in_order():
    tool = {"type": "function", "function": {"name": "f"}}
    encoded = chat.encode(
        [{"role": "user", "content": "hi"}, {"role": "system", "tools": [tool]}],
        [tool],
        tool_choice="none",
        response_format={"type": "json_object"},
    )
    messages = chat.read_conversation(encoded.ids(BYTES), BYTES).messages
    assert [message.type or message.role for message in messages] == [
        "tool-declare",
        "thinking-effort",
        "user",
        "tool-declare",
        "tool-choice",
        "response-format",
    ]
    assert messages[0].content[0].startswith("# Tools\n")
    assert messages[3].content[0].startswith("## New Tools Available\n")


def test_partial_message_is_left_open_after_the_options():
    partial = {"role": "assistant", "reasoning": "a", "content": "b", "partial": True}
    encoded = chat.encode([partial], thinking_effort=None, tool_choice="none")
    assert encoded.text.endswith(
        f'next message.{END}<|open|>message role="assistant"<|sep|>'
        "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b"
    )
    assert not any(segment.target for segment in encoded.segments)
    for messages in ([partial, partial], [{**partial, "tool_calls": [call(None)]}]):
        with pytest.raises(UserError, match=r"messages\[0\]: only the last message can be partial"):
            chat.encode(messages)


@pytest.mark.parametrize(("thinking", "opener"), [(True, "think"), (False, "response")])
def test_targets_are_what_the_model_would_sample(thinking, opener):
    messages = [
        {"role": "user", "content": "u"},
        assistant(call({"x": 1}), content="c", reasoning="r"),
        result("t", name="f"),
    ]
    encoded = chat.encode(messages, thinking=thinking)
    ids, targets = encoded.ids(BYTES), encoded.targets(BYTES)
    chosen = BYTES.decode(token for token, target in zip(ids, targets, strict=True) if target)
    whole = render(messages[1], thinking=thinking)
    assert chosen == whole.split(f"<|open|>{opener}<|sep|>", 1)[1]


def test_raw_block_is_no_target():
    encoded = chat.encode([assistant(call("oops"))])
    texts = [segment.text for segment in encoded.segments if not segment.target]
    assert texts[-12:] != [] and "oops" in texts and "json" in texts
    assert "call" not in texts


def test_parsed_message_is_written_back_among_the_others():
    turn = assistant(call('{"n": 1e2, "n": {"t":1}}'), content="c", reasoning="r")
    ids = chat.encode([turn], thinking_effort=None, add_generation_prompt=False).ids(BYTES)
    message = chat.read_conversation(ids, BYTES).messages[0]
    user = {"role": "user", "content": "u"}
    assert render(message, user, message) == render(turn, user, turn)
    assert render(message.to_dict()) == render(turn)
    assert json.loads(message.to_dict()["tool_calls"][0]["function"]["arguments"]) == {
        "n": {"t": 1}
    }


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({"role": "user"}, "messages must be a list, got dict"),
        ("hi", "messages must be a list, got str"),
        ([[{"role": "user"}]], r"messages\[0\] must be an object with a role, got list"),
        ([{"content": "x"}], r"messages\[0\] has the unknown role None"),
        ([{"role": "user"}, {"role": "User"}], r"messages\[1\] has the unknown role 'User'"),
        (
            [{"role": "user", "content": 5}],
            r"messages\[0\].content must be text or a list .* got int",
        ),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] must be an object"),
        ([{"role": "user", "content": [{"text": "x"}]}], r"content\[0\] has the unknown type None"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"unknown type 'audio'"),
        ([{"role": "system", "content": [image(size=(1, 1))]}], "only user messages hold media"),
        ([{"role": "tool", "content": [image()], "name": "n"}], "only user messages hold media"),
        (
            [{"role": "user", "content": "", "name": 5}],
            r"messages\[0\].name must be a string, got int",
        ),
        ([{"role": "assistant", "reasoning": 1}], r"messages\[0\].reasoning must be a string"),
        ([{"role": "assistant", "tool_calls": "f"}], r"messages\[0\].tool_calls must be a list"),
        ([assistant("f")], r"messages\[0\].tool_calls\[0\] must be an object"),
        ([assistant({"function": 5})], r"messages\[0\].tool_calls\[0\] must be an object"),
        (
            [assistant({"function": {}})],
            r"tool_calls\[0\].function.name must be a string, got None",
        ),
        ([assistant(call(5))], r"function.arguments: expected an object or JSON text, got int"),
        ([assistant(call([1]))], r"function.arguments: expected an object or JSON text, got list"),
        ([assistant(call({1: 2}))], r"function.arguments: the keys \[1\] are not all strings"),
        ([assistant(call({"a": object()}))], r"function.arguments: .*not JSON serializable"),
        ([{"role": "user", "tools": [{}]}], "only a system message can add tools"),
        (
            [{"role": "system", "tools": [{}]}],
            r"messages\[0\].tools\[0\].function must be an object",
        ),
    ],
)
def test_wrong_messages_are_refused_by_index(messages, message):
    with pytest.raises(UserError, match=message):
        chat.encode(messages)


def test_unknown_revision_is_refused():
    with pytest.raises(UserError, match="revision='new'"):
        chat.encode([], revision="new")


def test_rows_of_zeros_in_media_sizes_stand_for_no_image():
    part = {"type": "image", "image": "a.png"}
    messages = [{"role": "user", "content": [part, part, part]}]
    sizes = [(4, 5), (6, 7), (8, 9)]
    padded = chat.encode(messages, media_sizes=[*sizes, (0, 0)])
    assert padded.text == chat.encode(messages, media_sizes=sizes).text
