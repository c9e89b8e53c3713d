"""Random conversations with what must be read back from them, and random damage to their ids.

The truth is made first and the input for the encoder is derived from it, so nothing of the encoder
is used to say what is right.
"""

import json
import random
from typing import Any, NamedTuple

TEXTS = (
    '<|open|>message role="system"<|sep|>',
    "<|close|>message<|sep|><|end_of_msg|>",
    "<|close|>argument<|sep|>",
    "<|open|>think<|sep|>",
    "<|kimi_image_placeholder|>",
    "<|media_pad|>",
    "[BOS]",
    "&amp;&quot;",
    '"&<>',
    "\n\r\t ",
    '```json\n{"a": [1, 2]}\n```',
    "def f(x):\n    return x << 2\n",
    "你好,世界。",
    "naïve café",
    "👩🏽‍🚀👍",
    "\u0000\u200d\ufffd",
    "  ",
    "1e2 -0 null",
    "a",
    "The answer is 42.",
)
LITERALS = {
    "number": ("0", "-0", "1e2", "1E400", "3.140", "123456789012345678901234567890", "NaN"),
    "boolean": ("true", "false"),
    "null": ("null",),
    "object": ("{}", '{"t":1}', '{ "b" : [ null ] ,"a":"\\u00e9" }', '{"x":{"x":{}}}'),
    "array": ("[]", "[1, 2]", "[1,2 , [3]]", '["]","<|close|>argument<|sep|>"]'),
}
# Not an object, at least one level deep: written as it is.
MALFORMED = ("not json", " \n", "[1, 2]", '{"a": 1,}', '{"a"', "{a: 1}", '"text"', "{'a': 1}")
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Suche ☃",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    },
)


class RandomChat(NamedTuple):
    """Arguments of `encode` and the messages that it must have written.

    Attributes:
        messages: input.
        options: keyword arguments.
        truth: for each message a tuple: role, name, then what belongs to the role.
    """

    messages: list[dict]
    options: dict[str, Any]
    truth: list[tuple]


def text(rng: random.Random, most: int = 3) -> str:
    """Up to `most` pieces that are hard on encoders."""
    return "".join(rng.choices(TEXTS, k=rng.randint(0, most)))


def name(rng: random.Random) -> str:
    """A text that is not empty."""
    return rng.choice(("search", "python", 'x&"y', "名", 'a b="c"')) + rng.choice(("", "1", "&"))


def _literal(rng: random.Random) -> tuple[str, str, str]:
    """Type, text in XTML, JSON."""
    if rng.random() < 0.5:
        value = text(rng, 2)
        return "string", value, json.dumps(value, ensure_ascii=rng.random() < 0.5)
    kind = rng.choice(tuple(LITERALS))
    literal = rng.choice(LITERALS[kind])
    return kind, literal, literal


def _arguments(rng: random.Random) -> tuple[Any, tuple | str]:
    """Input of a call and the arguments (key, type, text) or the text it must be written as."""
    form = rng.random()
    if form < 0.1:
        return rng.choice((None, "")), ()
    if form < 0.25:
        malformed = rng.choice(MALFORMED)
        return malformed, malformed
    drawn = [(name(rng), *_literal(rng)) for _ in range(rng.randint(0, 3))]
    if form < 0.6:
        blank = rng.choice(("", " ", "\n\t"))
        members = [f"{json.dumps(key)}{blank}: {source}{blank}" for key, _, _, source in drawn]
        given = f"{blank}{{{blank}{','.join(members)}}}{rng.choice(('', ' ', ' trailing'))}"
        return given, tuple((key, kind, shown) for key, kind, shown, _ in drawn)
    values = {key: json.loads(source) for key, _, _, source in drawn}
    types = {key: kind for key, kind, _, _ in drawn}
    shown = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in values.items()
    }
    return values, tuple((key, types[key], shown[key]) for key in values)


def _content(rng: random.Random) -> tuple[Any, tuple]:
    """Content of a user message and the texts and sizes it must be read as."""
    if rng.random() < 0.7:
        words = text(rng)
        return words, (words,) if words else ()
    parts: list[dict] = []
    truth: list = []
    for _ in range(rng.randint(0, 3)):
        if rng.random() < 0.4:
            size = (rng.randint(1, 9999), rng.randint(1, 9999))
            parts.append({"type": "image", "size": size, "image": object()})
            truth.append(size)
            continue
        words = text(rng, 1)
        parts.append({"type": "text", "text": words})
        if words and truth and isinstance(truth[-1], str):
            truth[-1] += words
        elif words:
            truth.append(words)
    return parts, tuple(truth)


def _assistant(rng: random.Random, thinking: bool) -> tuple[dict, tuple, list[str]]:
    reasoning, content = text(rng), text(rng)
    message: dict[str, Any] = {"role": "assistant", "content": content or rng.choice((None, ""))}
    message[rng.choice(("reasoning_content", "reasoning"))] = reasoning
    calls, inputs, names = [], [], []
    for number in range(rng.choice((0, 0, 1, 2, 3))):
        given, written = _arguments(rng)
        names.append(name(rng))
        calls.append((names[-1], written))
        function = {"name": names[-1], "arguments": given}
        inputs.append({"id": f"call{number}", "type": "function", "function": function})
    if inputs:
        message["tool_calls"] = inputs
    speaker = name(rng) if rng.random() < 0.2 else None
    if speaker:
        message["name"] = speaker
    truth = ("assistant", speaker, reasoning if thinking else "", content, tuple(calls))
    return message, truth, names


def _results(rng: random.Random, names: list[str]) -> tuple[list[dict], list[tuple]]:
    """One result for each call, given in any order."""
    messages, truth = [], []
    for number, tool in enumerate(names):
        words = text(rng)
        messages.append({"role": "tool", "tool_call_id": f"call{number}", "content": words})
        truth.append(("tool", None, tool, number + 1, (words,) if words else ()))
    rng.shuffle(messages)
    return messages, truth


def random_chat(rng: random.Random) -> RandomChat:
    """A conversation of up to four turns (newest revision)."""
    thinking = rng.random() < 0.7
    options: dict[str, Any] = {
        "thinking": thinking,
        "thinking_effort": rng.choice((None, None, None, "low", "max")),
        "tools": TOOLS if rng.random() < 0.1 else None,
        "tool_choice": rng.choice((None, "auto", "auto", "none")),
        "add_generation_prompt": rng.random() < 0.5,
    }
    messages: list[dict] = []
    truth: list[tuple] = []
    for _ in range(rng.randint(1, 2)):
        role = rng.choice(("user", "user", "system"))
        given, content = _content(rng)
        if role == "system":
            given = text(rng)
            content = (given,) if given else ()
        speaker = name(rng) if rng.random() < 0.2 else None
        messages.append({"role": role, "content": given, "name": speaker})
        truth.append((role, speaker, content))
        message, said, names = _assistant(rng, thinking)
        messages.append(message)
        truth.append(said)
        results, answers = _results(rng, names)
        messages += results
        truth += answers
    return RandomChat(messages, options, truth)


def damage(rng: random.Random, ids: list[int], size: int) -> list[int]:
    """`ids` cut, with some ids removed, doubled, replaced or inserted, or ids without any order."""
    if rng.random() < 0.1:
        return [rng.randrange(-2, size + 2) for _ in range(rng.randint(0, 60))]
    ids = ids[: rng.randint(0, len(ids))] if rng.random() < 0.5 else list(ids)
    controls = range(size - 256 + 2, size - 256 + 6)  # end of message, open, close, separator
    for _ in range(rng.randint(0, 6)):
        at = rng.randint(0, len(ids))
        token = rng.choice(controls) if rng.random() < 0.6 else rng.randrange(size)
        action = rng.randrange(4)
        ids[at : at + rng.choice((0, 0, 1, 3))] = ([], [token], [token, token], ids[-8:])[action]
    return ids
