"""A record as a checked conversation: what holds for every format."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.lib.chat.messages import Message
from scripts.lib.formats.record import Record, RejectedError, text_of
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.formats.tools import canonical_tools, tools_as_text
from scripts.lib.ground.files import canonical, sha256_text

HASH_DIGITS = 16


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

    @property
    def prompt_hash(self) -> str:
        """Names the first user turn, whatever its case and white space."""
        return short_hash(normalised(next(message.content for message in self.messages if message.role == "user") or ""))

    @property
    def side_hash(self) -> str:
        """Names the prompt side: everything but the answers, which a later stage may write anew."""
        side = [[message.role, normalised(message.content or "")] for message in self.messages if message.role != "assistant"]
        return short_hash(canonical([side, self.tools]))

    @property
    def duplicate_key(self) -> str:
        """Equal for rows that ask the same: by the user's text alone when there is one user turn."""
        single = sum(message.role == "user" for message in self.messages) == 1
        return self.prompt_hash if single else self.side_hash

    @property
    def text(self) -> str:
        """All that a template would show, for a search."""
        parts = [part for m in self.messages for part in (m.content, m.reasoning_content, m.tool_calls) if part]
        return "\n".join([*parts, self.tools or ""])


def read_conversation(record: Record, dataset: DatasetSettings) -> Conversation:
    """Read one record by the dataset's format. Raises RejectedError with the reason when it gives no row."""
    columns, shape = dataset.columns, dataset.shape
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
    return Conversation(kept, shown, own_id, group or draft.group, dropped, tools is not None and dataset.tools == "drop")


def cell(record: Record, column: str | None) -> str | None:
    """The value of a column as text; None when there is no such column, no value or an empty one."""
    value = record.get(column) if column else None
    return None if value is None or value == "" else str(value)


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
    if any(message.role == "user" and not (message.content or "").strip() for message in messages):
        raise RejectedError("empty_user_turn")
    if kind == "native":
        answers = [message for message in messages if message.role == "assistant"]
        if not answers or any(answer.pending for answer in answers):
            raise RejectedError("no_answer")


def normalised(text: str) -> str:
    """`text` in one Unicode form, one case and single spaces, so that copies of a prompt are seen as such."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def short_hash(text: str) -> str:
    """The first 16 hex digits of the sha256 of `text`."""
    return sha256_text(text)[:HASH_DIGITS]
