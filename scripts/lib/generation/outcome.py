"""What became of the turns: failed ones by reason, how answers ended, and when there is too much of something."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.generation.conversation import Conversation, rejected_turns
from scripts.lib.ground.errors import StageError

log = logging.getLogger(__name__)
VALUE_LENGTH = 200
MEND = {
    "context_full": "conversations outgrow the target's context (history_failed are the turns behind): lower generate.max_tokens or the "
    "data set's max_prompt_tokens, or take generate.turns: first"
}


@dataclass
class Outcome:
    """Of `turns` turns: the `failed` rows, the `answers` by finish reason, and the repetitions by reason.

    `stop_at` maps truncated, empty and failed to the largest share that is let pass.
    """

    turns: int
    stop_at: Mapping[str, float]
    failed: list[dict[str, Any]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)

    def reject(self, conversation: Conversation, reason: str, value: str) -> list[tuple[int, str]]:
        """List the next turn of `conversation` as failed, and those after it for want of a history; gives both with their reasons."""
        lost = list(rejected_turns(conversation, reason))
        for turn, why in lost:
            self.failed.append({"id": conversation.id, "turn": turn, "reason": why, "value": value[:VALUE_LENGTH]})
            self.reasons[why] += 1
        self.check()
        return lost

    def shares(self) -> dict[str, float]:
        """Share of all turns that were cut at max_tokens, came empty, or failed in another way."""
        truncated = self.answers["length"] + self.reasons["truncated"]
        empty = self.reasons["empty_answer"]
        failed = self.reasons.total() - self.reasons["truncated"] - empty
        return {"truncated": truncated / self.turns, "empty": empty / self.turns, "failed": failed / self.turns}

    def check(self) -> None:
        """Raise StageError, after the table in the log, as soon as a share is over its limit for certain."""
        over = {name: share for name, share in self.shares().items() if share > self.stop_at[name]}
        if over:
            log.error("%s", self.table())
            name, share = next(iter(over.items()))
            causes = [MEND[reason] for reason in self.reasons if name == "failed" and reason in MEND] or ["mend the cause"]
            raise StageError(
                f"{share:.2%} of {self.turns} turns are {name}, limit {self.stop_at[name]:.2%} ({dict(sorted(self.reasons.items()))}, "
                f"answers {dict(sorted(self.answers.items()))}); finished answers are kept: {'; '.join(causes)}, or raise "
                f"runtime.requests.stop_at.{name}, and start again"
            )

    def table(self) -> str:
        """How the turns ended, one line each."""
        rows = [("answered: " + name, count) for name, count in sorted(self.answers.items())]
        rows += [("failed: " + name, count) for name, count in sorted(self.reasons.items())]
        rows += [("sent again: " + name, count) for name, count in sorted(self.repeated.items())]
        return "\n".join([f"{self.turns} turns", *(f"  {name:<30} {count:>10,}  {count / self.turns:7.2%}" for name, count in rows)])
