"""Tools, schemas, effort, tool choice and response format: what is written and what is refused."""

import pytest

from k3jax import chat
from k3jax.errors import UserError

USER = {"role": "user", "content": "hi"}


def function(parameters=None, name="f", **fields) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def declared(*tools) -> str:
    return chat.encode([], list(tools), thinking=False).text


def test_tools_are_sorted_and_compact_and_keep_lists_and_letters():
    tool = function({"type": "object", "properties": {"b": {"enum": ["é", 2, None]}, "a": True}})
    assert (
        '[{"function":{"name":"f","parameters":{"properties":{"a":true,'
        '"b":{"enum":["é",2,null]}},"type":"object"}},"type":"function"}]\n```<|close|>'
    ) in declared(tool)


def test_no_tools_write_nothing():
    for tools in (None, [], ()):
        assert chat.encode([USER], tools).text == chat.encode([USER]).text


def test_real_schemas_are_accepted():
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {"node": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "type": ["object", "null"],
        "properties": {
            "n": {"type": "integer", "minimum": 0, "exclusiveMaximum": 1e9, "multipleOf": 0.5},
            "s": {"type": "string", "pattern": "^a+$", "minLength": 1, "default": None},
            "l": {"type": "array", "items": {"type": "number"}, "uniqueItems": True, "maxItems": 3},
            "t": {"prefixItems": [True, False], "items": False},
            "type": {"const": 1, "x-extension": object.__name__},
        },
        "required": ["n"],
        "additionalProperties": False,
        "dependentRequired": {"n": ["s"]},
        "if": {"required": []},
        "then": True,
    }
    assert "tool-declare" in declared(function(schema, description="d"), function(name="g"))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (5, r"parameters must be a JSON Schema .* got int 5"),
        ("object", "parameters must be a JSON Schema"),
        ([], "parameters must be a JSON Schema"),
        ({"type": "strin"}, r"parameters.type must be among .* 'strin'"),
        ({"type": []}, "parameters.type must be among"),
        ({"type": [{"type": "string"}]}, "parameters.type must be among"),
        ({"properties": ["a"]}, "parameters.properties must be an object of schemas"),
        ({"properties": {"a": "string"}}, "parameters.properties.a must be a JSON Schema"),
        ({"properties": {"a": {"type": 1}}}, "parameters.properties.a.type must be"),
        ({"required": "a"}, "parameters.required must be a list of different strings"),
        ({"required": ["a", "a"]}, "parameters.required must be a list of different strings"),
        ({"required": [1]}, "parameters.required"),
        ({"items": 5}, "parameters.items must be a JSON Schema"),
        ({"items": [{}, 5]}, r"parameters.items\[1\] must be a JSON Schema"),
        ({"anyOf": []}, "parameters.anyOf must be a list of schemas"),
        ({"allOf": {"type": "object"}}, "parameters.allOf must be a list of schemas"),
        ({"not": None}, "parameters.not must be a JSON Schema"),
        ({"enum": "a"}, "parameters.enum must be a list"),
        ({"minimum": "0"}, "parameters.minimum must be a number"),
        ({"maximum": True}, "parameters.maximum must be a number"),
        ({"multipleOf": 0}, "parameters.multipleOf must be a number above 0"),
        ({"minLength": -1}, "parameters.minLength must be a whole number"),
        ({"maxItems": 1.5}, "parameters.maxItems must be a whole number"),
        ({"uniqueItems": "yes"}, "parameters.uniqueItems must be a boolean"),
        ({"description": 5}, "parameters.description must be a string"),
        ({"dependentRequired": {"a": "b"}}, "parameters.dependentRequired.a must be a list"),
        ({"default": float("nan")}, "tools is not JSON"),
        ({"default": {1: 2}}, "tools has the key 1"),
        ({"default": {1, 2}}, "tools is not JSON"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema, place):
    with pytest.raises(UserError, match=place):
        declared(function(), function(schema))


def test_deep_schemas_are_refused_without_a_crash():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"not": deep}
    with pytest.raises(UserError, match="nested too deeply"):
        declared(function(deep))
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UserError, match="is not JSON"):
        declared(function({"default": deep}))


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"type": "function"}, "tools must be a list of tools, got dict"),
        (["f"], r"tools\[0\] must be an object"),
        ([{"type": "function", "name": "f"}], r"tools\[0\].function must be an object with a name"),
        ([function(name="")], r"tools\[0\].function.name must be a string that is not empty"),
        ([function(name=5)], r"tools\[0\].function.name"),
        ([function(description=5)], r"tools\[0\].function.description must be a string"),
        ([{"type": 5}], r"tools\[0\].type is 5"),
    ],
)
def test_wrong_tools_are_refused(tools, message):
    with pytest.raises(UserError, match=message):
        chat.encode([USER], tools)


def added(*tools, **fields) -> str:
    return chat.encode([USER, {"role": "system", "tools": list(tools), **fields}]).text


def test_added_tools_follow_the_rules_of_servers():
    assert "New Tools" in added(function(name="a-B_9" + 251 * "x"), content="")
    with pytest.raises(UserError, match=r"messages\[1\].tools\[1\] repeats the name 'f'"):
        added(function(), function())
    for name in ("9a", "a b", "é", 'x&"y', 257 * "a"):
        with pytest.raises(UserError, match=r"messages\[1\].tools\[0\].function.name"):
            added(function(name=name))
    with pytest.raises(UserError, match=r"messages\[1\].tools\[0\].type is 'other'"):
        added({"type": "other"})
    with pytest.raises(UserError, match=r"messages\[1\] adds tools, so its content"):
        added(function(), content="x")


@pytest.mark.parametrize("effort", ["medium", "", "High", 3, True])
def test_unsupported_effort_is_refused(effort):
    with pytest.raises(UserError, match=r"thinking_effort=.* is not supported; use one of"):
        chat.encode([USER], thinking_effort=effort)


@pytest.mark.parametrize("effort", [None, "low", "medium"])
def test_effort_is_ignored_without_thinking(effort):
    assert "effort" not in chat.encode([USER], thinking=False, thinking_effort=effort).text


def test_tool_choice_writes_a_message_only_where_it_has_wording():
    named = {"type": "function", "function": {"name": "f"}}
    plain = chat.encode([USER]).text
    assert {chat.encode([USER], tool_choice=c).text for c in (None, "auto", named)} == {plain}
    assert "MUST NOT call any tools" in chat.encode([USER], [function()], tool_choice="none").text
    with pytest.raises(UserError, match="tool_choice='any'"):
        chat.encode([USER], tool_choice="any")


def test_schema_of_the_response_is_found_at_three_places():
    schema = {"type": "object"}
    texts = {
        chat.encode([USER], response_format={"type": "json_schema", "json_schema": given}).text
        for given in (schema, {"schema": schema}, {"json_schema": schema, "name": "n"})
    }
    assert len(texts) == 1 and '```json\n{"type":"object"}\n```<|close|>' in texts.pop()


def test_plain_response_formats_write_nothing():
    plain = chat.encode([USER]).text
    assert chat.encode([USER], response_format="text").text == plain
    assert chat.encode([USER], response_format={"type": "text"}).text == plain


@pytest.mark.parametrize(
    "given",
    [
        {"type": "xml"},
        {},
        "json_schema",
        7,
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}},
    ],
)
def test_wrong_response_formats_are_refused(given):
    with pytest.raises(UserError, match="response_format"):
        chat.encode([USER], response_format=given)
