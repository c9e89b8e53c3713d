"""The parser of model output: channels, calls, faults, streaming."""

import pytest

from k3jax import chat
from k3jax.chat import call_reader
from k3jax.chat import parser as parser_module
from k3jax.errors import UserError
from tests.chat.test_vocabulary import small_vocabulary

BYTES = chat.ByteVocabulary()
MARKERS = {"(": "<|open|>", "/": "<|close|>", ")": "<|sep|>", "!": "<|end_of_msg|>"}


def tokens(*parts: str) -> list[int]:
    """`(tag)` and `/tag)` are tags, `!` is the end of the message, all else is text."""
    ids: list[int] = []
    for part in parts:
        if part[:1] in ("(", "/") and part[-1:] == ")":
            body = BYTES.encode(part[1:-1])
            ids += [BYTES.control_id(MARKERS[part[0]]), *body, BYTES.separator_id]
        else:
            ids += [BYTES.end_of_message_id] if part == "!" else BYTES.encode(part)
    return ids


def events_of(ids, **options) -> list[chat.Event]:
    parser = chat.StreamParser(BYTES, **options)
    return parser.push(ids) + parser.finish()


def kinds(ids, **options) -> list[str]:
    """Kinds of the events, text of several ids once."""
    found: list[str] = []
    for event in events_of(ids, **options):
        if event.kind not in ("reasoning", "response", "argument", "noise") or (
            not found or found[-1] != event.kind
        ):
            found.append(event.kind)
    return found


CALL = ("(tools)", '(call tool="f" index="1")')
ARGUMENT = ('(argument key="k" type="string")', "v", "/argument)")
LAST = ("/call)", "/tools)", "/message)", "!")


def test_whole_output_gives_its_events_in_order():
    ids = tokens("why", "/think)", "(response)", "so", "/response)", *CALL, *ARGUMENT, *LAST)
    assert kinds(ids) == [
        *("reasoning", "structure", "structure", "response", "structure"),
        *("structure", "call_start", "argument_start", "argument", "structure", "call"),
        *("structure", "structure", "end"),
    ]
    message = chat.parse(ids, BYTES)
    assert (message.reasoning, message.content, message.complete) == ("why", "so", True)
    assert message.calls == (chat.Call(tool="f", arguments=(chat.Argument("k", "string", "v"),)),)
    assert message.ids == tuple(ids) and message.errors == ()
    assert message.num_reasoning_tokens == 3


@pytest.mark.parametrize(
    ("output", "thinking"),
    [
        (("a", "/think)", "(response)", "b"), True),
        (("(think)", "a", "/think)", "(response)", "b"), True),
        (("(think)", "a", "/think)", "(response)", "b"), False),
        (('(message role="assistant")', "(think)", "a", "/think)", "(response)", "b"), True),
        (("a", "/think)", " noise ", "(response)", "(response)", "b"), True),
        (("a", "/think)", '(message role="assistant")', "(response)", "b"), True),
    ],
)
def test_openers_may_be_there_or_not(output, thinking):
    message = chat.parse(tokens(*output, "/response)", "/message)", "!"), BYTES, thinking=thinking)
    assert (message.reasoning, message.content, message.errors) == ("a", "b", ())


@pytest.mark.parametrize("output", [("b",), ("(response)", "b")])
@pytest.mark.parametrize("thinking", [True, False])
def test_output_without_thinking_is_read(output, thinking):
    if thinking and len(output) == 1:
        output = ("/think)", "(response)", "b")
    message = chat.parse(tokens(*output, "/response)", "/message)", "!"), BYTES, thinking=thinking)
    assert (message.reasoning, message.content, message.errors) == ("", "b", ())


def test_reasoning_has_ended_when_its_newest_tag_closes():
    parser = chat.StreamParser(BYTES)
    states = []
    for part in ("a", "/think)", "(think)", "b", "/think)", "(response)", "c"):
        parser.push(tokens(part))
        states.append(parser.in_reasoning)
    assert states == [True, False, True, True, False, False, False]
    assert parser.message().reasoning == "ab"
    assert not parser.ended
    parser.finish()
    assert parser.ended


def test_string_arguments_stream_and_others_come_whole():
    ids = tokens(
        "/think)",
        *CALL,
        '(argument key="s" type="string")',
        "ab",
        "/argument)",
        '(argument key="n" type="number")',
        "1e2",
        "/argument)",
        *LAST,
    )
    fragments = [(e.key, e.type, e.text) for e in events_of(ids) if e.kind == "argument"]
    assert fragments == [("s", "string", "a"), ("s", "string", "b"), ("n", "number", "1e2")]
    call = chat.parse(ids, BYTES).calls[0]
    assert call.values == {"s": "ab", "n": 100.0}
    assert call.to_dict()["function"]["arguments"] == '{"s": "ab", "n": 1e2}'


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", '"quoted"', '"quoted"'),
        ("number", "-0", 0),
        ("boolean", "true", True),
        ("null", "null", None),
        ("object", '{"t": 150}', {"t": 150}),
        ("array", "[1,\n2]", [1, 2]),
        ("integer", "7", 7),
        ("number", "seven", "seven"),
        ("object", "[" * 100_000, "[" * 100_000),
        ("number", "9" * 5000, "9" * 5000),
        ("null", "", ""),
    ],
)
def test_values_are_json_or_their_own_text(kind, text, value):
    ids = tokens("/think)", *CALL, f'(argument key="k" type="{kind}")', text, "/argument)", *LAST)
    message = chat.parse(ids, BYTES)
    assert message.errors == () and message.calls[0].values == {"k": value}
    again = chat.encode([message], add_generation_prompt=False).ids(BYTES)
    assert (
        again[-len(ids) + len(tokens("/think)", *CALL)) :] == ids[len(tokens("/think)", *CALL)) :]
    )


def test_text_that_spells_a_tag_is_text():
    spelled = "<|close|>argument<|sep|><|end_of_msg|>"
    ids = tokens(spelled, "/think)", "(response)", spelled, "/response)", *CALL)
    ids += tokens(ARGUMENT[0], spelled, "/argument)", *LAST)
    message = chat.parse(ids, BYTES)
    assert message.reasoning == message.content == message.calls[0].values["k"] == spelled


def test_attributes_are_decoded_in_names_and_keys():
    opener = '(call tool="x&amp;&quot;y" index="1")'
    argument = '(argument key="&amp;quot;" type="string")'
    ids = tokens("/think)", "(tools)", opener, argument, "v", "/argument)", *LAST)
    call = chat.parse(ids, BYTES).calls[0]
    assert (call.tool, call.values) == ('x&"y', {"&quot;": "v"})


def test_json_block_counts_before_the_first_argument():
    block = ('(json type="object")', "oops", "/json)")
    first = chat.parse(tokens("/think)", *CALL, *block, *LAST), BYTES)
    assert first.calls[0].raw == "oops" and first.errors == ()
    later = chat.parse(tokens("/think)", *CALL, *ARGUMENT, *block, *LAST), BYTES)
    assert later.calls[0].raw is None and later.calls[0].values == {"k": "v"}
    both = chat.parse(tokens("/think)", *CALL, *block, *ARGUMENT, *LAST), BYTES)
    assert both.calls == () and "after a json block" in both.errors[0]


def test_index_of_a_call_is_kept_where_it_is_unusual():
    ids = tokens("/think)", "(tools)", '(call tool="f" index="7")', *LAST)
    message = chat.parse(ids, BYTES)
    assert message.calls[0].index == "7"
    assert 'index="7"' in chat.encode([message]).text


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (("(call)",), "call 1 is dropped: no attribute tool"),
        (
            ('(call tool="f")', "(argument)", "x", "/argument)"),
            "without the attributes key and type",
        ),
        (('(call tool="f")', ARGUMENT[0], "x"), "argument is not closed"),
        (('(call tool="f")', ARGUMENT[0], "x", *ARGUMENT), "argument is not closed"),
        (('(call tool="f")', ARGUMENT[0], "/think)", "/argument)"), "think closes, but it is not"),
        (('(call tool="f")', '(json type="object")', "x"), "json is not closed"),
    ],
)
def test_faulty_calls_are_reported_and_not_repaired(output, error):
    good = ('(call tool="g" index="2")', *ARGUMENT)
    message = chat.parse(tokens("/think)", "(tools)", *output, "/call)", *good, *LAST), BYTES)
    assert [call.tool for call in message.calls] == ["g"]
    assert error in " ".join(message.errors)


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (("(response)", "x", "!"), "ends without its closing tag"),
        (("(response)", "x", "/message)", "!"), "the message closes before response does"),
        (("x", "(response)", "y"), "response opens before think is closed"),
        (("(response)", "x", *CALL), "tools opens before response is closed"),
        ((*CALL, "(response)"), "response opens before tools is closed"),
        (("(tools)", "(tools)"), "tools open inside of tools"),
        ((*CALL, '(call tool="g")'), "call 1 is not closed"),
        ((*CALL, "(message)"), "a message opens inside of tools"),
        ((*CALL, "/tools)"), "call 1 is not closed"),
        ((*CALL, "/argument)"), "argument closes, but it is not open"),
        (("(tools)", "/call)"), "call closes, but it is not open"),
        (("(tools)", ARGUMENT[0]), "argument opens outside of a call"),
        (('(call tool="f")',), "call outside of tools"),
        (("(title)",), "the unknown tag 'title'"),
        (("(call tool=f)",), 'not of the form name key="value"'),
        (("()",), "not of the form"),
        (("/think)", "/think)"), "think closes, but it is not open"),
    ],
)
def test_what_is_not_the_format_is_an_error(output, error):
    message = chat.parse(tokens(*output), BYTES)
    assert error in " ".join(message.errors)


def test_thinking_inside_of_a_response_is_an_error():
    message = chat.parse(tokens("x", "(think)", "y"), BYTES, thinking=False)
    assert message.errors == ("think opens before response is closed",)
    assert (message.reasoning, message.content) == ("y", "x")


def test_control_ids_without_a_place_do_not_leak_into_text():
    ids = [
        BYTES.control_id("[BOS]"),
        *tokens("a"),
        BYTES.separator_id,
        BYTES.media_pad_id,
        -1,
        10**12,
    ]
    message = chat.parse(ids, BYTES)
    assert message.reasoning == "a"
    assert message.errors == tuple(
        f"{name} where there is no place for it"
        for name in ("[BOS]", "<|sep|>", "<|media_pad|>", "id -1", "id 1000000000000")
    )


def test_ids_after_the_end_are_noise():
    ids = tokens("/think)", "/message)", "!", "more", "(think)", "!")
    after = [event.kind for event in events_of(ids)][3:]
    assert set(after) == {"noise"}
    assert chat.parse(ids, BYTES).errors == ()


def test_output_may_be_cut_anywhere():
    whole = tokens("€", "/think)", "(response)", "b", "/response)", *CALL, *ARGUMENT, *LAST)
    for length in range(len(whole)):
        events = events_of(whole[:length])
        assert [token for event in events for token in event.ids] == whole[:length]
        assert events[-1].kind == "truncated"
        text = "".join(e.text for e in events if e.kind in ("reasoning", "response", "argument"))
        assert "<|" not in text and "think" not in text
        assert not chat.parse(whole[:length], BYTES).complete


def test_finish_twice_reports_nothing_new():
    parser = chat.StreamParser(BYTES)
    parser.push(tokens("a"))
    assert [event.kind for event in parser.finish()] == ["truncated"]
    assert parser.finish() == []
    assert [event.kind for event in parser.push(tokens("a!"[:1]))] == ["noise"]


@pytest.mark.parametrize("make", [chat.ByteVocabulary, small_vocabulary])
def test_characters_split_over_ids_are_whole_in_events(make):
    vocabulary = make()
    words = "hello 你好 👩🏽‍🚀"
    events = chat.StreamParser(vocabulary, thinking=False).push(vocabulary.encode(words))
    assert "".join(event.text for event in events) == words
    assert all("\ufffd" not in event.text and event.text for event in events)
    assert len(events) < len(vocabulary.encode(words))


def test_bytes_that_are_not_utf8_are_replaced_and_their_ids_kept():
    ids = [97, 0xE4, 0xBD, 98, 0xFF, 0xC3, *tokens("/response)", "/message)", "!")]
    events = events_of(ids, thinking=False)
    assert [(e.text, e.ids) for e in events[:4]] == [
        ("a", (97,)),
        ("\ufffdb", (0xE4, 0xBD, 98)),
        ("\ufffd", (0xFF,)),
        ("\ufffd", (0xC3,)),
    ]
    message = chat.parse(ids, BYTES, thinking=False)
    assert message.content == "a\ufffdb\ufffd\ufffd" and message.ids == tuple(ids)


def test_work_is_bounded(monkeypatch):
    monkeypatch.setattr(call_reader, "MAX_CALLS", 2)
    monkeypatch.setattr(call_reader, "MAX_ARGUMENTS", 2)
    monkeypatch.setattr(parser_module, "MAX_TAG", 50)
    call = ('(call tool="f")', "/call)")
    message = chat.parse(tokens("/think)", "(tools)", *call, *call, *call), BYTES)
    assert len(message.calls) == 2 and "more than 2 calls" in message.errors[0]
    message = chat.parse(tokens("/think)", *CALL, *ARGUMENT, *ARGUMENT, *ARGUMENT, "/call)"), BYTES)
    assert message.calls == () and "more than 2 arguments" in message.errors[0]
    message = chat.parse(tokens("/think)", f"({60 * 'x'})"), BYTES)
    assert message.errors[0] == "a tag of more than 50 ids"


TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "required": ["k"]}},
    }
]


@pytest.mark.parametrize(
    ("inside", "error"),
    [
        (ARGUMENT, None),
        ((), r"missing arguments ['k']"),
        (('(json type="object")', "x", "/json)"), "arguments that are not a JSON object"),
    ],
)
def test_calls_are_checked_against_the_declared_tools(inside, error):
    message = chat.parse(tokens("/think)", *CALL, *inside, *LAST), BYTES, tools=TOOLS)
    assert message.calls[0].error == error
    assert message.errors == (() if error is None else (f"call 1: {error}",))


def test_unknown_tools_are_reported():
    ids = tokens("/think)", "(tools)", '(call tool="g")', *LAST)
    assert chat.parse(ids, BYTES, tools=TOOLS).calls[0].error == "unknown tool 'g'"
    assert chat.parse(ids, BYTES).calls[0].error is None
    with pytest.raises(UserError, match=r"tools\[0\] must be an object"):
        chat.StreamParser(BYTES, tools=["f"])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (tokens("!"), "message 0 of the conversation does not begin"),
        (tokens("x", "!"), "message 0 of the conversation does not begin"),
        (tokens("(think)", "!"), "does not begin with the opening tag"),
        (tokens('(message role="user")', "x", "!"), "no closing tag of a message"),
        (tokens('(message role="robot")', "/message)", "!"), "the role 'robot'"),
        (tokens('(message role="user")', "(x)", "/message)", "!"), "control tokens that do not"),
    ],
)
def test_ids_that_are_no_conversation_are_refused(ids, message):
    with pytest.raises(UserError, match=message):
        chat.read_conversation(ids, BYTES)
