"""Format `sharegpt`: {id, conversations: [{from, value}]}.

Long chats are stored in pieces `x_0`, `x_2`, …: rows of their own, but one conversation, so the stem is the group.
"""

import re
from collections.abc import Mapping

from scripts.lib.formats.record import Draft, Format, Record
from scripts.lib.formats.turns_list import typed_messages

PIECE = re.compile(r"(.+)_\d+")
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "tool": "tool",
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
}


def convert(record: Record, columns: Mapping[str, str], roles: Mapping[str, str]) -> Draft:
    """Read one record."""
    messages = typed_messages(record[columns["messages"]], columns["speaker"], columns["content"], roles)
    piece = PIECE.fullmatch(str(record.get(columns["id"]) or ""))
    return Draft(messages, group=piece[1] if piece else None)


DEFAULTS = {"messages": "conversations", "id": "id", "speaker": "from", "content": "value"}
FORMAT = Format(convert, ("messages",), ("speaker", "content"), defaults=DEFAULTS, roles=ROLES)
