"""Whether a call fits the declared tools: known name, required arguments present."""

import dataclasses
from collections.abc import Sequence

from k3jax.chat.messages import Call
from k3jax.chat.options import tools_body


def required_arguments(tools: Sequence[dict]) -> dict[str, frozenset[str]]:
    """Required arguments of each declared function.

    Raises:
        UserError: the tools are not what `encode` accepts.
    """
    tools_body(tools, "tools", added=False)
    required: dict[str, frozenset[str]] = {}
    for tool in tools:
        kind = tool.get("type", "function")
        if kind != "function":  # the server defines it: its kind is its name
            required[kind] = frozenset()
            continue
        function = tool["function"]
        parameters = function.get("parameters")
        names = parameters.get("required", ()) if isinstance(parameters, dict) else ()
        required[function["name"]] = frozenset(names)
    return required


def find_fault(call: Call, required: dict[str, frozenset[str]]) -> Call:
    """`call`, with `error` if it is not one the tools allow; it is not repaired."""
    error = None
    if call.tool not in required:
        error = f"unknown tool {call.tool!r}"
    elif call.raw is not None:
        error = "arguments that are not a JSON object"
    elif missing := required[call.tool] - {argument.key for argument in call.arguments}:
        error = f"missing arguments {sorted(missing)}"
    return call if error is None else dataclasses.replace(call, error=error)
