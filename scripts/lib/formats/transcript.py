"""Format `transcript`: a whole chat in one text, as glaive-function-calling writes it.

Turns start with USER:, ASSISTANT: or FUNCTION RESPONSE: after three line breaks; the same words inside a turn are text.
Calls are `<functioncall> {"name": …, "arguments": '{…}'}`: the arguments are JSON in single quotes, apostrophes not escaped.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from scripts.lib.chat.messages import Message
from scripts.lib.formats.record import Draft, Format, Record, RejectedError, text_of
from scripts.lib.formats.tools import canonical_calls

TURN = re.compile(r"(?:^|\n\n\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE): ?")
ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
CALL, END = "<functioncall>", "<|endoftext|>"
QUOTED = re.compile(r'\{\s*"name":\s*"(?P<name>[^"]+)",\s*"arguments":\s*\'(?P<arguments>.*)\'\s*\}', re.DOTALL)


def convert(record: Record, columns: Mapping[str, str], roles: Mapping[str, str]) -> Draft:
    """Read one record: system text, tools from the JSON objects in it, and the turns of the chat."""
    head, tools = split_system(text_of(record[columns["preamble"]]) or "")
    system = [Message("system", head)] if head else []
    before, *parts = TURN.split((text_of(record[columns["messages"]]) or "").strip())
    if before.strip():
        raise RejectedError("text_before_first_turn", before)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return Draft([*system, *(message(roles[label], text) for label, text in turns)], tools)


def split_system(text: str) -> tuple[str, list[Any] | None]:
    """The system text before the first function schema, and the schemas, which follow one another as bare objects."""
    head, brace, rest = text.removeprefix("SYSTEM:").partition("{")
    schemas, position, body = [], 0, brace + rest
    while position < len(body):
        try:
            schema, end = json.JSONDecoder().raw_decode(body, position)
        except (ValueError, RecursionError) as error:
            raise RejectedError("bad_tools", body[position:]) from error
        schemas.append(schema)
        position = end + len(body[end:]) - len(body[end:].lstrip())
    return head.strip(), schemas or None


def message(role: str, text: str) -> Message:
    """One turn without its end mark; a call in it becomes a tool call."""
    said, marked, call = text.strip().removesuffix(END).strip().partition(CALL)
    if role != "assistant" or not marked:
        return Message(role, said + marked + call or None)
    return Message(role, said.strip() or None, tool_calls=canonical_calls([called(call.strip())]))


def called(text: str) -> dict[str, Any]:
    """Name and arguments of one call; RejectedError when it is neither plain JSON nor has its arguments in single quotes."""
    quoted = QUOTED.fullmatch(text)
    if quoted:
        return {"name": quoted["name"], "arguments": quoted["arguments"]}
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise RejectedError("bad_tool_call", text) from error


FORMAT = Format(convert, ("preamble", "messages"), defaults={"preamble": "system", "messages": "chat"}, roles=ROLES)
