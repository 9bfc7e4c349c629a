"""Lists of {speaker, content} turns: what several formats have in common."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from scripts.lib.chat.messages import Message
from scripts.lib.formats.reasoning import split_reasoning
from scripts.lib.formats.record import Record, RejectedError, text_of
from scripts.lib.formats.tools import as_json, canonical_calls

REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a turn that hold what was thought before the answer


def listed(turns: Any) -> Any:
    """`turns`, or the list that it holds when it is the JSON text of a list of objects."""
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        try:
            parsed = json.loads(turns)
        except (ValueError, RecursionError):
            return turns
        return parsed if isinstance(parsed, list) and all(isinstance(turn, dict) for turn in parsed) else turns
    return turns


def typed_messages(turns: Any, speaker: str, content: str, roles: Mapping[str, str]) -> list[Message]:
    """The messages of a list of turns, null being an empty one; roles by `roles`. Raises RejectedError on a label that is not in it."""
    turns = [] if turns is None else turns
    if not isinstance(turns, list):
        raise RejectedError("not_a_list_of_turns", turns)
    return [typed_message(turn, speaker, content, roles) for turn in turns]


def typed_message(turn: Any, speaker: str, content: str, roles: Mapping[str, str]) -> Message:
    """One turn as a message. An assistant turn without a usable text becomes one that the target has still to write."""
    if not isinstance(turn, dict) or speaker not in turn:
        raise RejectedError("not_a_turn", turn)
    label, said = turn[speaker], turn.get(content)
    if not isinstance(label, str | int):
        raise RejectedError("no_speaker", turn)
    role = roles.get(str(label))
    if role is None:
        raise RejectedError(f"unknown_role:{label}", said)
    if role == "tool" and isinstance(said, dict | list) and not is_parts(said):
        return result(as_json(said, "not_text"), turn)
    text = text_of(said)
    if role == "assistant":
        return answer(text, turn)
    if text is None:
        raise RejectedError("empty_content", turn)
    return result(text, turn) if role == "tool" else Message(role, text)


def is_parts(value: Any) -> bool:
    """Whether `value` is a list of content parts, which carry a type, and not what a tool gave back."""
    return isinstance(value, list) and all(isinstance(part, dict) and "type" in part for part in value)


def result(text: str, turn: Record) -> Message:
    """What a tool gave back, with the call that it answers and the tool's name where the turn says so."""
    known = {name: str(turn[name]) for name in ("tool_call_id", "name") if turn.get(name) is not None}
    return Message("tool", text, **known)


def answer(text: str | None, turn: Record) -> Message:
    """An assistant message, with the reasoning that stands before the answer in the text or in a field of its own."""
    calls = canonical_calls(turn.get("tool_calls") or turn.get("function_call"))
    field = next((turn[name] for name in REASONING if turn.get(name) is not None), None)
    reasoning, rest = split_reasoning(text)
    return Message("assistant", rest or None, text_of(field) if field is not None else reasoning, calls)


def flattened(turns: Iterable[Any]) -> list[Any]:
    """`turns` with the lists in it opened by one level."""
    return [item for turn in turns for item in (turn if isinstance(turn, list) else [turn])]
