"""Which turns of a prepared row the target writes, and the history that each of them sees."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.chat.messages import Message, answerable, from_rows


@dataclass
class Conversation:
    """One prepared row on its way: `places` are the message indexes of the turns to write, `answers` those written so far."""

    id: str
    group: str
    prompt_hash: str
    tools: str | None
    partition: str
    messages: tuple[Message, ...]
    places: tuple[int, ...]
    answers: list[Message] = field(default_factory=list)

    @classmethod
    def of(cls, row: Mapping[str, Any], turns: str) -> "Conversation":
        """The conversation of a prepared `row`; `turns` is first, all or last."""
        messages = from_rows(row["messages"])
        return cls(row["id"], row["group"], row["prompt_hash"], row["tools"], row["partition"], messages, places(messages, turns))

    @property
    def turn(self) -> int:
        """Number of the next turn to write."""
        return len(self.answers)

    def history(self) -> tuple[Message, ...]:
        """The messages before the next turn: the source's own, with the answers written so far in their places."""
        written = dict(zip(self.places, self.answers, strict=False))
        return tuple(written.get(index, message) for index, message in enumerate(self.messages[: self.places[self.turn]]))


def places(messages: Sequence[Message], turns: str) -> tuple[int, ...]:
    """Message indexes of the turns to write: of assistant messages after the first user message, and the end when that awaits an answer.

    `first` is the answer to the first user turn, `all` is every answer, `last` is the last one and what it needs: those still pending.
    """
    every = tuple(answerable(messages))
    if turns == "first":
        return every[:1]
    if turns == "all":
        return every
    return tuple(place for place in every[:-1] if messages[place].pending) + every[-1:]


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Reasoning and content of an answer. Without `</think>` there is no reasoning; an empty one stays an empty string."""
    thought, mark, content = text.partition("</think>")
    if not mark:
        return None, text
    return thought.removeprefix("<think>").strip("\n"), content.lstrip("\n")
