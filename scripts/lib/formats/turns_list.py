"""Lists of {speaker, content} turns: what several formats have in common."""

from collections.abc import Iterable, Mapping
from typing import Any

from scripts.lib.chat.messages import Message
from scripts.lib.formats.record import Record, RejectedError, text_of
from scripts.lib.formats.tools import canonical_calls

OPEN, CLOSE = "<think>", "</think>"


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
    label = turn[speaker]
    if label not in roles:
        raise RejectedError(f"unknown_role:{label}", turn.get(content))
    text = text_of(turn.get(content))
    if roles[label] == "assistant":
        return answer(text, turn)
    if text is None:
        raise RejectedError("empty_content", turn)
    return Message(roles[label], text)


def answer(text: str | None, turn: Record) -> Message:
    """An assistant message, with the reasoning that stands before the answer in the text or in a field of its own."""
    calls = canonical_calls(turn["tool_calls"]) if turn.get("tool_calls") else None
    field = next((turn[name] for name in ("reasoning_content", "reasoning") if turn.get(name) is not None), None)
    reasoning, rest = split_reasoning(text)
    return Message("assistant", rest or None, text_of(field) if field is not None else reasoning, calls)


def split_reasoning(text: str | None) -> tuple[str | None, str | None]:
    """Reasoning and answer of a text that starts with a think tag; an unclosed tag leaves no answer, a lone closing one is dropped."""
    stripped = (text or "").lstrip()
    if stripped.startswith(OPEN):
        reasoning, closed, rest = stripped.removeprefix(OPEN).partition(CLOSE)
        return (reasoning.strip() or None, rest.strip()) if closed else (None, None)
    if stripped.startswith(CLOSE):
        return None, stripped.removeprefix(CLOSE).strip()
    return None, text


def flattened(turns: Iterable[Any]) -> list[Any]:
    """`turns` with the lists in it opened by one level."""
    return [item for turn in turns for item in (turn if isinstance(turn, list) else [turn])]
