"""Format `sharegpt`: {id, conversations: [{from, value}]}.

Long chats are stored in pieces `x_0`, `x_2`, …: rows of their own, but one conversation, so the stem is the group.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from scripts.lib.chat.messages import Message
from scripts.lib.formats.record import Draft, Format, Record
from scripts.lib.formats.turns_list import listed, typed_messages

JUNK = re.compile(r"!?Too many requests in 1 hour\. Try again later\.")  # what the site said instead of an answer
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
    messages = typed_messages(listed(record[columns["messages"]]), columns["speaker"], columns["content"], roles)
    messages = [replace(message, content=None) if is_junk(message) else message for message in messages]
    piece = PIECE.fullmatch(str(record.get(columns["id"]) or ""))
    return Draft(messages, group=piece[1] if piece else None)


def is_junk(message: Message) -> bool:
    """Whether an answer is none: it is then one that the target has still to write."""
    return message.role == "assistant" and JUNK.match(message.content or "") is not None


DEFAULTS = {"messages": "conversations", "id": "id", "speaker": "from", "content": "value"}
FORMAT = Format(convert, ("messages",), ("speaker", "content"), defaults=DEFAULTS, roles=ROLES)
