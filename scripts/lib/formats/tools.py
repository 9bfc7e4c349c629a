"""Tool schemas and tool calls as canonical JSON: equal calls give equal text, however the source writes them."""

import ast
import json
from collections.abc import Mapping
from typing import Any

from scripts.lib.formats.record import RejectedError
from scripts.lib.ground.files import canonical

JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "int": "integer", "str": "string", "bool": "boolean"}


def canonical_tools(value: Any) -> str | None:
    """A list of function schemas, bare or in the `{type, function}` form, as canonical JSON; None when there is none.

    Python's type names become JSON schema's. Raises RejectedError on anything else.
    """
    schemas = parsed_json(value, "bad_tools")
    if not schemas:
        return None
    schemas = [parsed_json(schema, "bad_tools") for schema in (schemas if isinstance(schemas, list) else [schemas])]
    functions = [schema.get("function", schema) if isinstance(schema, Mapping) else None for schema in schemas]
    if not all(isinstance(function, Mapping) and isinstance(function.get("name"), str) for function in functions):
        raise RejectedError("bad_tools", value)
    return as_json([{"type": "function", "function": json_schema(function)} for function in functions], "bad_tools")


def json_schema(value: Any) -> Any:
    """`value` with Python's names under `type` replaced by those of JSON schema, at every depth."""
    if isinstance(value, list):
        return [json_schema(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    fixed = {key: json_schema(item) for key, item in value.items()}
    if isinstance(fixed.get("type"), str):
        fixed["type"] = JSON_TYPES.get(fixed["type"], fixed["type"])
    return fixed


def canonical_calls(value: Any) -> str | None:
    """A list of tool calls as canonical JSON, arguments as an object; text that is no JSON object stays text; None when there is none.

    Raises RejectedError when a call has no name.
    """
    calls = parsed_json(value, "bad_tool_call")
    if not calls:
        return None
    return as_json([canonical_call(call) for call in (calls if isinstance(calls, list) else [calls])], "bad_tool_call")


def as_json(value: Any, reason: str) -> str:
    """`value` as canonical JSON. Raises RejectedError with `reason` for what JSON cannot hold, such as a date of a Parquet file."""
    try:
        return canonical(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RejectedError(reason, value) from error


def canonical_call(call: Any) -> dict[str, Any]:
    """One call as {type, function: {name, arguments}}, with its id if it has one."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RejectedError("bad_tool_call", call)
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments_of(function.get("arguments"))}}


def arguments_of(value: Any) -> Any:
    """The arguments of a call: an object as it is or as text holds it, other text unchanged, nothing as an empty object."""
    if not isinstance(value, str):
        return {} if value is None else value
    if not value.strip():
        return {}
    try:
        parsed = literal(value)
    except ValueError:
        return value
    return parsed if isinstance(parsed, dict) else value


def parsed_json(value: Any, reason: str) -> Any:
    """`value`, or what it holds when it is text. Raises RejectedError with `reason` for text that is neither JSON nor a Python literal."""
    if not isinstance(value, str):
        return value
    try:
        return literal(value) if value.strip() else None
    except ValueError as error:
        raise RejectedError(reason, value) from error


def literal(text: str) -> Any:
    """What `text` holds: JSON, JSON with its apostrophes escaped, or a literal in Python's notation, which quotes with either mark.

    Never by changing quotes: an apostrophe inside a value would become the end of it. Raises ValueError for other text.
    """
    for candidate in (text, text.replace("\\'", "'")):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    try:
        value = ast.literal_eval(text.strip())
        canonical(value)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"neither JSON nor a Python literal: {text[:40]}") from error
    return value


def tools_as_text(tools: str) -> str:
    """The schemas as a passage for the system message, one a line, for templates that take no tools."""
    lines = "\n".join(canonical(tool["function"]) for tool in json.loads(tools))
    return f"You can call these functions:\n{lines}"
