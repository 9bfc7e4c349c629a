"""Which turns of a prepared row the target writes, and the history that each of them sees."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.chat.messages import Message, answerable, from_rows
from scripts.lib.chat.template import ChatTemplate


@dataclass
class Conversation:
    """One prepared row on its way: `places` are the message indexes of the turns to write, `answers` those written so far."""

    id: str
    group: str
    prompt_hash: str
    tools: str | None
    partition: str
    prompt_tokens: int
    messages: tuple[Message, ...]
    places: tuple[int, ...]
    answers: list[Message] = field(default_factory=list)

    @classmethod
    def of(cls, row: Mapping[str, Any], turns: str | int) -> "Conversation":
        """The conversation of a prepared `row`; `turns` as `places` takes it."""
        messages = from_rows(row["messages"])
        partition, tokens = row["partition"], row["prompt_tokens"]
        return cls(row["id"], row["group"], row["prompt_hash"], row["tools"], partition, tokens, messages, places(messages, turns))

    @property
    def turn(self) -> int:
        """Number of the next turn to write."""
        return len(self.answers)

    def history(self) -> tuple[Message, ...]:
        """The messages before the next turn: the source's own, with the answers written so far in their places."""
        written = dict(zip(self.places, self.answers, strict=False))
        return tuple(written.get(index, message) for index, message in enumerate(self.messages[: self.places[self.turn]]))


def places(messages: Sequence[Message], turns: str | int) -> tuple[int, ...]:
    """Message indexes of the turns to write: of assistant messages after the first user message, and the end when that awaits an answer.

    `first` is the answer to the first user turn, a number the first so many, `all` is every answer, `last` is the last one and what it
    needs: those still pending.
    """
    every = tuple(answerable(messages))
    count = 1 if turns == "first" else turns
    if isinstance(count, int):
        return every[:count]
    if turns == "all":
        return every
    return tuple(place for place in every[:-1] if messages[place].pending) + every[-1:]


def spoken(output_ids: Sequence[int], template: ChatTemplate) -> Message:
    """The message in the ids of an answer; its end of turn is left out."""
    text = template.decode([token for token in output_ids if token not in template.eos_ids])
    reasoning, content = split_reasoning(text) if template.takes_reasoning else (None, text)
    return Message("assistant", content, reasoning)


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Reasoning and content of an answer. Without `</think>` there is no reasoning; an empty one stays an empty string."""
    thought, mark, content = text.partition("</think>")
    if not mark:
        return None, text
    return thought.removeprefix("<think>").strip("\n"), content.lstrip("\n")


def rejected_turns(conversation: Conversation, reason: str) -> Iterator[tuple[int, str]]:
    """Number and reason of the turns that are lost when the next turn of `conversation` fails for `reason`."""
    yield conversation.turn, reason
    for turn in range(conversation.turn + 1, len(conversation.places)):
        yield turn, "history_failed"
