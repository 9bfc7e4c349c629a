"""Format `turns`: a list of the user's turns; the answers between them are still to be written."""

from collections.abc import Mapping

from scripts.lib.chat.messages import Message
from scripts.lib.formats.record import Draft, Format, Record, RejectedError


def convert(record: Record, columns: Mapping[str, str], roles: Mapping[str, str]) -> Draft:
    """Read one record. The answer to the last turn is one to be written like the others."""
    turns = record[columns["messages"]]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise RejectedError("not_a_list_of_texts", turns)
    return Draft([message for turn in turns for message in (Message("user", turn), Message("assistant"))])


FORMAT = Format(convert, ("messages",))
