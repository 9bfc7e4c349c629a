"""A conversation as typed messages, and as the rows that Parquet holds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

ROLES = ("system", "user", "assistant", "tool")
TEXTS = ("content", "reasoning_content", "tool_calls", "tool_call_id", "name")  # of a message beside its role


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    `tool_calls` is the canonical JSON text of the list of calls. An assistant message with neither content nor
    tool calls is a turn that the target has still to write. `tool_call_id` and `name` say which call a tool's message answers.
    """

    role: str
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def pending(self) -> bool:
        """Whether the target has still to write this turn."""
        return self.role == "assistant" and self.content is None and self.tool_calls is None


def to_rows(messages: Iterable[Message]) -> list[dict[str, str | None]]:
    """`messages` as the structs of a `messages` column."""
    return [asdict(message) for message in messages]


def from_rows(rows: Sequence[Mapping[str, str | None]]) -> tuple[Message, ...]:
    """The messages of one cell of a `messages` column."""
    return tuple(Message(str(row["role"]), *(row.get(name) for name in TEXTS)) for row in rows)


def answerable(messages: Sequence[Message]) -> Iterator[int]:
    """Every place after the first user message where an assistant turn stands or is due."""
    asked = False
    for index, message in enumerate(messages):
        asked = asked or message.role == "user"
        if asked and message.role == "assistant":
            yield index
    if asked and messages[-1].role != "assistant":
        yield len(messages)
