"""Tool schemas and tool calls as canonical JSON: equal calls give equal text, however the source writes them."""

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
    schemas = schemas if isinstance(schemas, list) else [schemas]
    functions = [schema.get("function", schema) if isinstance(schema, Mapping) else None for schema in schemas]
    if not all(isinstance(function, Mapping) and isinstance(function.get("name"), str) for function in functions):
        raise RejectedError("bad_tools", value)
    return canonical([{"type": "function", "function": json_schema(function)} for function in functions])


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


def canonical_calls(value: Any) -> str:
    """A list of tool calls as canonical JSON, arguments as an object; text that is no JSON object stays text.

    Raises RejectedError when a call has no name.
    """
    calls = parsed_json(value, "bad_tool_call")
    calls = calls if isinstance(calls, list) else [calls]
    return canonical([canonical_call(call) for call in calls])


def canonical_call(call: Any) -> dict[str, Any]:
    """One call as {type, function: {name, arguments}}, with its id if it has one."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RejectedError("bad_tool_call", call)
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments_of(function.get("arguments"))}}


def arguments_of(value: Any) -> Any:
    """The arguments of a call: an object as it is or as JSON text holds it, other text unchanged, nothing as an empty object."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        return parsed if isinstance(parsed, dict) else value
    return {} if value is None else value


def parsed_json(value: Any, reason: str) -> Any:
    """`value`, or what it holds when it is JSON text. Raises RejectedError with `reason` for other text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise RejectedError(reason, value) from error


def tools_as_text(tools: str) -> str:
    """The schemas as a passage for the system message, one a line, for templates that take no tools."""
    lines = "\n".join(canonical(tool["function"]) for tool in json.loads(tools))
    return f"You can call these functions:\n{lines}"
