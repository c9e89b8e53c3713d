"""What a caller asks for besides the messages: tools, effort, tool choice, response format.

Each is written as a system message with a `type`; the wording is part of the format.
"""

import re
from collections.abc import Sequence
from typing import Any

from k3jax.chat.schema import check_schema, compact_json
from k3jax.errors import UserError, describe

EFFORTS = ("low", "high", "max")  # the wording advertises `medium`, the released encoder refuses it

TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOL_CHOICE = "The system is invoked with `tool_choice={}`.\nYou MUST {} in the next message."
TOOL_CHOICES = {"auto": None, "required": "call tools", "none": "NOT call any tools"}
RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) "
    "or any additional formatting."
)
SCHEMA = "\nThe JSON data must match the following schema:\n"

_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,255}")


def tools_body(tools: Sequence[dict], where: str, *, added: bool) -> str:
    """Body of a `tool-declare` message.

    Args:
        tools: `{"type": "function", "function": {"name": ..., "parameters": JSON Schema}}` each.
        where: begins the message of an error.
        added: whether a system message adds the tools in mid-conversation, which permits
            functions with different names of letters, digits, `_` and `-` only.
    """
    if not isinstance(tools, (list, tuple)):
        raise UserError(f"{where} must be a list of tools, got {type(tools).__name__}")
    names: set[str] = set()
    for number, tool in enumerate(tools):
        name = _check_tool(tool, f"{where}[{number}]", added)
        if added and name in names:
            raise UserError(f"{where}[{number}] repeats the name {describe(name)}")
        names.add(name)
    return _fenced(MORE_TOOLS if added else TOOLS, compact_json(tools, where))


def _check_tool(tool: Any, where: str, added: bool) -> str:
    if not isinstance(tool, dict):
        raise UserError(f"{where} must be an object with type and function, got {describe(tool)}")
    kind = tool.get("type", "function")
    if not isinstance(kind, str) or (kind != "function" and added):
        raise UserError(f"{where}.type is {describe(kind)}; only functions can be declared here")
    if kind != "function":
        return kind  # a kind of tool that the server defines: no schema of ours
    function = tool.get("function")
    if not isinstance(function, dict):
        raise UserError(f"{where}.function must be an object with a name, got {describe(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{where}.function.name must be a string that is not empty, got {describe(name)}"
        )
    if added and not _TOOL_NAME.fullmatch(name):
        raise UserError(
            f"{where}.function.name {name[:300]!r} must be a letter or _, then at most 255 "
            "letters, digits, _ or -"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise UserError(
            f"{where}.function.description must be a string, got {describe(description)}"
        )
    if function.get("parameters") is not None:
        check_schema(function["parameters"], f"{where}.function.parameters")
    return name


def effort_body(effort: str) -> str:
    """Body of a `thinking-effort` message."""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise UserError(
            f"thinking_effort={describe(effort)} is not supported; use one of {EFFORTS}, or "
            "None for no message about effort"
        )
    return EFFORT.format(effort)


def tool_choice_body(choice: str | dict | None) -> str | None:
    """Body of a `tool-choice` message; None where the released encoder writes none."""
    if choice is None or isinstance(choice, dict):
        return None  # a named function has no official wording
    if isinstance(choice, str) and choice in TOOL_CHOICES:
        duty = TOOL_CHOICES[choice]
        return None if duty is None else TOOL_CHOICE.format(choice, duty)
    raise UserError(
        f"tool_choice={describe(choice)} must be 'auto', 'none', 'required' or an object "
        "naming a function"
    )


def response_format_body(response_format: str | dict | None) -> str | None:
    """Body of a `response-format` message; None for plain text."""
    kind = response_format
    if isinstance(response_format, dict):
        kind = response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return RESPONSE_FORMAT.format(kind)
    if kind == "json_schema" and isinstance(response_format, dict):
        where = "response_format.json_schema"
        schema = response_format.get("json_schema")
        if isinstance(schema, dict):
            schema = schema.get("schema", schema.get("json_schema", schema))
        check_schema(schema, where)
        return _fenced(RESPONSE_FORMAT.format(kind) + SCHEMA, compact_json(schema, where))
    raise UserError(
        f"response_format={describe(response_format)} must be an object whose type is 'text', "
        "'json_object' or 'json_schema' (with the schema under json_schema)"
    )


def _fenced(text: str, content: str) -> str:
    return f"{text}```json\n{content}\n```"
