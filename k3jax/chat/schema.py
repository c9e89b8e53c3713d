"""Whether a value is a JSON Schema: the types and ranges of its keywords, in all drafts."""

import json
import math
from collections.abc import Callable
from typing import Any

from k3jax.errors import UserError, describe

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


def compact_json(value: Any, where: str) -> str:
    """`value` as JSON with sorted keys, `,` and `:` without blanks, non-ASCII kept.

    Raises:
        UserError: `value` is not JSON; the message begins with `where`.
    """
    try:
        _check_keys(value, where)
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where} is not JSON: {error}") from None


def _check_keys(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise UserError(f"{where} has the key {describe(key)}; JSON keys are strings")
            _check_keys(member, where)
    elif isinstance(value, (list, tuple)):
        for member in value:
            _check_keys(member, where)


def check_schema(schema: Any, where: str) -> None:
    """Refuse what is not a JSON Schema; keywords that no draft defines are free.

    Args:
        schema: a boolean or an object.
        where: begins the message, for example `tools[0].function.parameters`.

    Raises:
        UserError: naming the place inside the schema and what was found there.
    """
    try:
        _check(schema, where)
    except RecursionError:
        raise UserError(f"{where} is nested too deeply to be read") from None


def _check(schema: Any, where: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _refusal(where, "a JSON Schema (an object or a boolean)", schema)
    for keyword, value in schema.items():
        if keyword in _KEYWORDS:
            _KEYWORDS[keyword](value, f"{where}.{keyword}")


def _refusal(where: str, expected: str, found: Any) -> UserError:
    return UserError(f"{where} must be {expected}, got {type(found).__name__} {describe(found)}")


def _expect(holds: bool, where: str, expected: str, found: Any) -> None:
    if not holds:
        raise _refusal(where, expected, found)


def _type(value: Any, where: str) -> None:
    names = value if isinstance(value, (list, tuple)) and value else [value]
    for name in names:
        _expect(isinstance(name, str) and name in TYPES, where, f"among {TYPES}", name)


def _schemas(value: Any, where: str) -> None:
    _expect(isinstance(value, (list, tuple)) and len(value) > 0, where, "a list of schemas", value)
    for number, schema in enumerate(value):
        _check(schema, f"{where}[{number}]")


def _named_schemas(value: Any, where: str) -> None:
    _expect(isinstance(value, dict), where, "an object of schemas", value)
    for name, schema in value.items():
        _check(schema, _inside(where, name))


def _inside(where: str, name: Any) -> str:
    return f"{where}.{name if isinstance(name, str) else describe(name)}"


def _items(value: Any, where: str) -> None:
    (_schemas if isinstance(value, (list, tuple)) else _check)(value, where)


def _dependencies(value: Any, where: str) -> None:
    _expect(isinstance(value, dict), where, "an object", value)
    for name, needed in value.items():
        (_names if isinstance(needed, (list, tuple)) else _check)(needed, _inside(where, name))


def _names(value: Any, where: str) -> None:
    holds = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
    _expect(holds and len(set(value)) == len(value), where, "a list of different strings", value)


def _name_lists(value: Any, where: str) -> None:
    _expect(isinstance(value, dict), where, "an object of lists of strings", value)
    for name, needed in value.items():
        _names(needed, _inside(where, name))


def _list(value: Any, where: str) -> None:
    _expect(isinstance(value, (list, tuple)), where, "a list", value)


def _string(value: Any, where: str) -> None:
    _expect(isinstance(value, str), where, "a string", value)


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)  # of any size


def _number(value: Any, where: str) -> None:
    _expect(_is_number(value), where, "a number", value)


def _bound(value: Any, where: str) -> None:
    # A boolean is the form of the fourth draft.
    _expect(isinstance(value, bool) or _is_number(value), where, "a number", value)


def _positive(value: Any, where: str) -> None:
    _expect(_is_number(value) and value > 0, where, "a number above 0", value)


def _count(value: Any, where: str) -> None:
    holds = _is_number(value) and value >= 0 and value == int(value)
    _expect(holds, where, "a whole number from 0 on", value)


def _boolean(value: Any, where: str) -> None:
    _expect(isinstance(value, bool), where, "a boolean", value)


def _rules(rule: Callable[[Any, str], None], *keywords: str) -> dict[str, Callable]:
    return dict.fromkeys(keywords, rule)


_KEYWORDS: dict[str, Callable[[Any, str], None]] = (
    _rules(_type, "type")
    | _rules(_schemas, "allOf", "anyOf", "oneOf", "prefixItems")
    | _rules(_named_schemas, "properties", "patternProperties", "$defs", "definitions")
    | _rules(_named_schemas, "dependentSchemas")
    | _rules(_items, "items")
    | _rules(_check, "additionalProperties", "additionalItems", "unevaluatedProperties")
    | _rules(_check, "unevaluatedItems", "contains", "propertyNames", "not", "if", "then", "else")
    | _rules(_dependencies, "dependencies")
    | _rules(_names, "required")
    | _rules(_name_lists, "dependentRequired")
    | _rules(_list, "enum")
    | _rules(_string, "$schema", "$id", "$ref", "$anchor", "$comment", "title", "description")
    | _rules(_string, "pattern", "format", "contentMediaType", "contentEncoding")
    | _rules(_number, "minimum", "maximum")
    | _rules(_bound, "exclusiveMinimum", "exclusiveMaximum")
    | _rules(_positive, "multipleOf")
    | _rules(_count, "minLength", "maxLength", "minItems", "maxItems", "minContains")
    | _rules(_count, "maxContains", "minProperties", "maxProperties")
    | _rules(_boolean, "uniqueItems", "deprecated", "readOnly", "writeOnly")
)
