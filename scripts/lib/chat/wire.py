"""Messages in the form that chat templates read."""

import json
from collections.abc import Mapping
from typing import Any

from scripts.lib.chat.messages import Message


def wire_message(message: Message, as_mapping: bool) -> dict[str, Any]:
    """`message` as a chat template takes it; tool call arguments as a mapping, or else as JSON text.

    Content null beside tool calls becomes the empty text, as servers send it: many templates print "None" or fail.
    """
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content is not None:
        wire["reasoning_content"] = message.reasoning_content
    if message.tool_calls is not None:
        wire["content"] = message.content or ""
        wire["tool_calls"] = [wire_call(call, as_mapping) for call in json.loads(message.tool_calls)]
    return wire


def wire_call(call: Mapping[str, Any], as_mapping: bool) -> dict[str, Any]:
    """One tool call with its arguments as a mapping, or as JSON text. Text that is no JSON object stays as it is."""
    function = dict(call.get("function", call))
    arguments = function.get("arguments", {})
    if as_mapping and isinstance(arguments, str):
        arguments = parsed(arguments)
    elif not as_mapping and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    rest = {key: value for key, value in call.items() if key != "function"} if "function" in call else {}
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def parsed(text: str) -> Any:
    """The JSON object in `text`, or `text` itself when it holds none."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
