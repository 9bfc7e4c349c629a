"""A record as a checked conversation: what holds for every format."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from scripts.lib.chat.messages import Message
from scripts.lib.chat.signature import normalise
from scripts.lib.formats.record import Record, RejectedError, text_of
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.formats.tools import canonical_tools, parsed_json, tools_as_text
from scripts.lib.ground.files import canonical, sha256_text

HASH_DIGITS = 16
FOLDED = bytes(32 if chr(code).isspace() else ord(chr(code).lower()) if code < 128 else code for code in range(256))


@dataclass(frozen=True)
class Conversation:
    """Messages from the first user turn on, after system messages; `dropped` counts what came before and was no answer to anything."""

    messages: tuple[Message, ...]
    tools: str | None
    own_id: str | None
    group: str | None
    dropped: int
    tools_dropped: bool

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the first assistant turn: what the target sees first."""
        roles = [message.role for message in self.messages]
        return self.messages[: roles.index("assistant")] if "assistant" in roles else self.messages

    @cached_property
    def prompt_hash(self) -> str:
        """Names the first user turn, whatever its case and white space."""
        return short_hash(normalised(next(message.content for message in self.messages if message.role == "user") or ""))

    @cached_property
    def side_hash(self) -> str:
        """Names the prompt side: everything but the answers, which a later stage may write anew."""
        side = [[message.role, normalised(message.content or "")] for message in self.messages if message.role != "assistant"]
        return short_hash(canonical([side, self.tools]))

    @property
    def duplicate_key(self) -> str:
        """Equal for rows that ask the same: by the user's text alone when there is one user turn."""
        single = sum(message.role == "user" for message in self.messages) == 1
        return self.prompt_hash if single else self.side_hash


def read_conversation(record: Record, dataset: DatasetSettings) -> Conversation:
    """Read one record by the dataset's format. Raises RejectedError with the reason when it gives no row."""
    columns, shape = dataset.columns, dataset.shape
    if "record" in columns:
        record = unfolded(record, columns["record"])
    for name in shape.required:
        if columns[name] not in record:
            raise RejectedError(f"missing_column:{columns[name]}", ", ".join(map(str, record)))
    draft = shape.convert(record, columns, dataset.roles)
    tools = canonical_tools(record.get(columns["tools"]) if "tools" in columns else draft.tools)
    messages = with_system(draft.messages, text_of(record.get(columns["system"])) if "system" in columns else None)
    if tools and dataset.tools == "system":
        messages = with_tools_text(messages, tools)
    kept, dropped = from_first_user(messages)
    check_turns(kept, dataset.kind)
    own_id, group = (cell(record, columns.get(name)) for name in ("id", "group"))
    shown = tools if dataset.tools == "keep" else None
    check_characters([*(text for message in kept for text in vars(message).values()), shown, own_id, group])
    return Conversation(kept, shown, own_id, group or draft.group, dropped, tools is not None and dataset.tools == "drop")


def unfolded(record: Record, column: str) -> Record:
    """`record` with the fields of the record that lies in one of its columns, as an object or as JSON text."""
    inner = parsed_json(record.get(column), "bad_record")
    if not isinstance(inner, Mapping):
        raise RejectedError("bad_record", inner)
    return {**record, **inner}


def cell(record: Record, column: str | None) -> str | None:
    """The value of a column as text; None when there is no such column, no value, an empty one or NaN."""
    value = record.get(column) if column else None
    missing = value is None or value == "" or (isinstance(value, float) and math.isnan(value))
    return None if missing else str(value)


def with_system(messages: Sequence[Message], text: str | None) -> list[Message]:
    """`messages` after a system message with `text`, if there is any."""
    return [Message("system", text), *messages] if text else list(messages)


def with_tools_text(messages: Sequence[Message], tools: str) -> list[Message]:
    """`messages` with the tools written into the system message, or into a new one."""
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{tools_as_text(tools)}"), *messages[1:]]
    return [Message("system", tools_as_text(tools)), *messages]


def from_first_user(messages: Sequence[Message]) -> tuple[tuple[Message, ...], int]:
    """System messages, then everything from the first user turn on; and how many messages before it were dropped."""
    if not messages:
        raise RejectedError("empty")
    roles = [message.role for message in messages]
    if "user" not in roles:
        raise RejectedError("no_user_turn", ", ".join(roles))
    first = roles.index("user")
    system = [message for message in messages[:first] if message.role == "system"]
    return (*system, *messages[first:]), first - len(system)


def check_turns(messages: Sequence[Message], kind: str) -> None:
    """Raise RejectedError when a user turn is empty, or when a native row lacks an answer."""
    if any(message.role == "user" and (not message.content or message.content.isspace()) for message in messages):
        raise RejectedError("empty_user_turn")
    if kind == "native":
        answers = [message for message in messages if message.role == "assistant"]
        if not answers or any(answer.pending for answer in answers):
            raise RejectedError("no_answer")


def check_characters(texts: Iterable[str | None]) -> None:
    """Raise RejectedError when a text holds half a character (a lone surrogate), which no file and no tokenizer can hold.

    Chats that were cut into pieces hold such halves where a cut went through an emoji.
    """
    for text in texts:
        if text and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RejectedError("half_a_character", text[max(error.start - 20, 0) : error.end + 20]) from error


def normalised(text: str) -> str:
    """`text` in one Unicode form, one case and single spaces, so that copies of a prompt are seen as such.

    ASCII text, which is most, takes a path through bytes that gives the same, ten times as fast.
    """
    if not text.isascii():
        return normalise(text)
    plain = text.encode().translate(FOLDED)
    while b"  " in plain:
        plain = plain.replace(b"  ", b" ")
    return plain.strip(b" ").decode()


def short_hash(text: str) -> str:
    """The first 16 hex digits of the sha256 of `text`."""
    return sha256_text(text)[:HASH_DIGITS]
