"""Messages in the form that chat templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.lib.chat.messages import Message


def wire_messages(messages: Sequence[Message], as_mapping: bool) -> list[dict[str, Any]]:
    """A conversation as a chat template takes it, with an id for every call and every result.

    Sources often leave ids out, and templates that print them (Kimi K2's does) would print nothing. A call without one gets
    `functions.NAME:N`, as Kimi's servers name the N-th call of a conversation; results without one answer open calls in their order.
    """
    wires, count, unanswered = [], 0, list[str]()
    for message in messages:
        wire = wire_message(message, as_mapping)
        for call in wire.get("tool_calls", ()):
            call.setdefault("id", f"functions.{call['function']['name']}:{count}")
            unanswered.append(call["id"])
            count += 1
        if message.role == "tool" and unanswered:
            answered = wire.setdefault("tool_call_id", unanswered[0])
            unanswered = [call_id for call_id in unanswered if call_id != answered]
        wires.append(wire)
    return wires


def wire_message(message: Message, as_mapping: bool) -> dict[str, Any]:
    """`message` as a chat template takes it; tool call arguments as a mapping, or else as JSON text.

    Content null beside tool calls becomes the empty text, as servers send it: many templates print "None" or fail.
    """
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content is not None:
        wire["reasoning_content"] = message.reasoning_content
    wire |= {key: text for key, text in (("tool_call_id", message.tool_call_id), ("name", message.name)) if text is not None}
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
