"""Format `messages`: a list of {role, content}, a list of such lists (one per turn), or a plain string (one user turn).

A string that is the JSON text of a list of turns is read as that list.
`columns.speaker` and `columns.content` name the keys of a turn where they are others than role and content.
"""

from collections.abc import Mapping

from scripts.lib.chat.messages import Message
from scripts.lib.formats.record import ROLE_NAMES, Draft, Format, Record
from scripts.lib.formats.turns_list import listed, typed_messages


def convert(record: Record, columns: Mapping[str, str], roles: Mapping[str, str]) -> Draft:
    """Read one record. After each inner list that does not end with an answer, the answer is still to be written."""
    turns = listed(record[columns["messages"]])
    speaker, content = columns["speaker"], columns["content"]
    if isinstance(turns, str):
        return Draft([Message("user", turns)])
    if not (isinstance(turns, list) and turns and isinstance(turns[0], list)):
        return Draft(typed_messages(turns, speaker, content, roles))
    messages: list[Message] = []
    for inner in turns:
        messages += typed_messages(inner, speaker, content, roles)
        if messages and messages[-1].role != "assistant":
            messages.append(Message("assistant"))
    return Draft(messages)


FORMAT = Format(convert, ("messages",), ("speaker", "content"), defaults={"speaker": "role", "content": "content"}, roles=ROLE_NAMES)
