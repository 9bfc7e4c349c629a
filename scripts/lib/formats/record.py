"""What a format module gives back for one record, or why it cannot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.chat.messages import Message

Record = Mapping[str, Any]
VALUE_LIMIT = 200
REASON_LIMIT = 60  # a label found in the data is part of some reasons
COMMON_COLUMNS = ("record", "id", "group", "system", "tools")  # every format takes these
ROLE_NAMES = {"system": "system", "user": "user", "assistant": "assistant", "ai": "assistant", "tool": "tool"}


class RejectedError(Exception):
    """This record gives no row: `reason` is counted, `value` is what was found, shortened."""

    def __init__(self, reason: str, value: Any = "") -> None:
        super().__init__(reason)
        self.reason = encodable(" ".join(reason.split())[:REASON_LIMIT])
        self.value = encodable(str(value)[:VALUE_LIMIT])


@dataclass(frozen=True)
class Draft:
    """The messages of one record as its format reads them; `tools` as the record has them, `group` where the format knows it."""

    messages: Sequence[Message]
    tools: Any = None
    group: str | None = None


@dataclass(frozen=True)
class Format:
    """One shape of record, in the names that `columns` of the config gives to its parts.

    `required` names columns that every record must hold, `keys` names keys inside its turns, `optional` names columns
    that may be absent. `defaults` holds what these names stand for when the config is silent.
    `convert` gets the record, the column of each name, and the role of each label.
    """

    convert: Callable[[Record, Mapping[str, str], Mapping[str, str]], Draft]
    required: tuple[str, ...]
    keys: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)

    def known(self) -> tuple[str, ...]:
        """Every name that `columns` of the config may hold."""
        return (*self.required, *self.keys, *self.optional, *COMMON_COLUMNS)


def encodable(text: str) -> str:
    """`text` with the halves of a character that stand alone, which no file can hold, as question marks."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def text_of(value: Any) -> str | None:
    """`value` as text: itself, the joined text parts of a list of parts, or None. Raises RejectedError for anything else."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    raise RejectedError("not_text", value)
