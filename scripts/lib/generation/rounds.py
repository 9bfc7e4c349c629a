"""Writes the answers round by round: round t holds turn t of every conversation, in batches of a fixed composition."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.chat.template import ChatTemplate, RenderError
from scripts.lib.engines.protocol import Completion, Request, TargetEngine
from scripts.lib.generation.conversation import Conversation, rejected_turns, spoken
from scripts.lib.generation.journal import Journal, Record
from scripts.lib.generation.settings import GenerateSettings
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.progress import Progress

log = logging.getLogger(__name__)
ATTEMPTS = 2  # for an empty answer, when sampling may give another


@dataclass(frozen=True)
class Turn:
    """One turn about to be written."""

    conversation: Conversation
    prompt_ids: tuple[int, ...]
    max_tokens: int

    @property
    def order(self) -> tuple[int, str]:
        """Sorts like lengths together, so that a batch holds little padding."""
        return len(self.prompt_ids), self.conversation.id

    def request(self, name: str, attempt: int) -> Request:
        """What the engine is asked; the key seeds the sampling."""
        return Request(f"{name}/{self.conversation.id}/{self.conversation.turn}/{attempt}", self.prompt_ids, self.max_tokens)


@dataclass
class Rounds:
    """All turns of all conversations: `responses` and `failed` hold one row per turn when `run` returns."""

    settings: GenerateSettings
    template: ChatTemplate
    context: int
    engine: Callable[[], TargetEngine]
    journal: Journal
    progress: Progress
    responses: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)

    def run(self, conversations: Sequence[Conversation]) -> None:
        """Write every turn; a turn that fails takes the later ones of its conversation with it."""
        alive = list(conversations)
        number = 0
        while alive:
            turns = sorted((turn for turn in map(self._turn, alive) if turn), key=lambda turn: turn.order)
            for start in range(0, len(turns), self.settings.batch):
                self._batch(f"{number}/{start}", turns[start : start + self.settings.batch])
            alive = [conversation for conversation in alive if number < conversation.turn < len(conversation.places)]
            number += 1

    def _turn(self, conversation: Conversation) -> Turn | None:
        """The next turn of `conversation`, None once it is rejected because the target cannot take it."""
        try:
            prompt_ids = tuple(self.template.prompt_ids(conversation.history(), conversation.tools))
        except RenderError as error:
            self._reject(conversation, "template", str(error))
            return None
        room = self.context - len(prompt_ids)
        if room < 1:
            self._reject(conversation, "context_full", f"{len(prompt_ids)} prompt tokens, the target takes {self.context}")
            return None
        return Turn(conversation, prompt_ids, min(room, self.settings.max_tokens[conversation.partition]))

    def _batch(self, label: str, turns: Sequence[Turn]) -> None:
        """Take the batch from the journal or let the engine write it, then sort its answers."""
        names = [[turn.conversation.id, turn.conversation.turn] for turn in turns]
        resumed = label in self.journal.batches
        if not resumed:
            self.journal.append(label, [record(turn, *answer) for turn, answer in zip(turns, self._answers(turns), strict=True)])
        records = self.journal.batches[label]
        if [[entry["id"], entry["turn"]] for entry in records] != names:
            raise StageError(f"{self.journal.path}: batch {label} holds other turns than it should; delete the file and start again")
        for turn, entry in zip(turns, records, strict=True):
            self._sort(turn, entry)
        if not resumed:
            self.progress.add(len(turns), sum(len(entry["output_ids"]) for entry in records))

    def _answers(self, turns: Sequence[Turn]) -> list[tuple[Completion, int]]:
        """Completion and number of attempts of each turn; sampled answers that came out empty are tried once more, together."""
        answers = [(done, 1) for done in self.engine().generate([turn.request(self.settings.name, 1) for turn in turns])]
        again = [place for place, (done, _) in enumerate(answers) if not self._content(done.output_ids)]
        if again and self.settings.temperature > 0:
            retried = self.engine().generate([turns[place].request(self.settings.name, ATTEMPTS) for place in again])
            for place, done in zip(again, retried, strict=True):
                answers[place] = (done, ATTEMPTS)
        return answers

    def _sort(self, turn: Turn, entry: Record) -> None:
        """Make `entry` a response, or reject it, and hand the answer to the conversation."""
        conversation, content = turn.conversation, self._content(entry["output_ids"])
        if not content:
            self._reject(conversation, "empty_answer", f"{entry['attempts']} attempts")
            return
        if entry["finish_reason"] == "length" and self.settings.truncated == "drop":
            self._reject(conversation, "truncated", f"{len(content)} tokens, max_tokens {turn.max_tokens}")
            return
        said = spoken(content, self.template)
        self.responses.append(
            {
                "id": conversation.id,
                "turn": conversation.turn,
                "group": conversation.group,
                "prompt_hash": conversation.prompt_hash,
                "prompt_ids": list(turn.prompt_ids),
                "output_ids": list(entry["output_ids"]),
                "finish_reason": entry["finish_reason"],
                "text": said.content,
                "reasoning": said.reasoning_content,
                "attempts": entry["attempts"],
            }
        )
        conversation.answers.append(said)

    def _content(self, output_ids: Sequence[int]) -> list[int]:
        """The answer without its end-of-turn token."""
        return [token for token in output_ids if token not in self.template.eos_ids]

    def _reject(self, conversation: Conversation, reason: str, value: str) -> None:
        """Reject the next turn of `conversation` for `reason`, and the turns after it for want of a history."""
        for turn, why in rejected_turns(conversation, reason):
            self.failed.append({"id": conversation.id, "turn": turn, "reason": why, "value": value[:200]})


def record(turn: Turn, done: Completion, attempts: int) -> Record:
    """What the journal keeps of one answer."""
    return {
        "id": turn.conversation.id,
        "turn": turn.conversation.turn,
        "output_ids": list(done.output_ids),
        "finish_reason": done.finish_reason,
        "attempts": attempts,
    }
