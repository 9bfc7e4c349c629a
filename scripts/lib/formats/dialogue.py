"""Format `dialogue`: messages of two people. The first to speak is the user; what one says in a row is one turn."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from scripts.lib.chat.messages import Message
from scripts.lib.formats.record import Draft, Format, Record, RejectedError, text_of
from scripts.lib.formats.turns_list import flattened


def convert(record: Record, columns: Mapping[str, str], roles: Mapping[str, str]) -> Draft:
    """Read one record, also when the messages lie in one list per burst. Raises RejectedError with more than two speakers."""
    turns = record[columns["messages"]]
    if not isinstance(turns, list):
        raise RejectedError("not_a_list_of_turns", turns)
    said = [spoken(turn, columns["speaker"], columns["content"]) for turn in flattened(turns)]
    speakers = list(dict.fromkeys(speaker for speaker, _ in said))
    if len(speakers) > 2:
        raise RejectedError("more_than_two_speakers", len(speakers))
    role = dict(zip(speakers, ("user", "assistant"), strict=False))
    return Draft(
        [Message(role[speaker], "\n".join(text for _, text in burst)) for speaker, burst in groupby(said, key=lambda turn: turn[0])]
    )


def spoken(turn: Any, speaker: str, content: str) -> tuple[str, str]:
    """Speaker and text of one turn; RejectedError when it names no speaker."""
    if not isinstance(turn, dict) or not isinstance(turn.get(speaker), str | int):
        raise RejectedError("not_a_turn", turn)
    return str(turn[speaker]), text_of(turn.get(content)) or ""


FORMAT = Format(convert, ("messages",), ("speaker", "content"))
