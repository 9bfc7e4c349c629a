"""What a drafter is worth on rows it has not seen.

Shapes: Q slots of a batch, M slots active at one step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scripts.lib.eagle3.model import Drafter
from scripts.lib.training.batches import Batch
from scripts.lib.training.loss import CHUNK_ROWS, Teacher, soft_cross_entropy_
from scripts.lib.training.repetition import ends_in_loop
from scripts.lib.training.unroll import Step, unroll


@dataclass
class Walk:
    """Verify cycles walked over rows, and the drafts that they accepted."""

    cycles: int = 0
    accepted: int = 0

    @property
    def accept_length(self) -> float | None:
        """Tokens a cycle, the target's own one included; None when no cycle was walked."""
        return 1 + self.accepted / self.cycles if self.cycles else None


@dataclass
class Tally:
    """Sums over batches: losses and hits of each step, walks over plain rows and over rows that end in a loop."""

    loss: list[float]
    hits: list[int]
    slots: list[int]
    plain: Walk = field(default_factory=Walk)
    loops: Walk = field(default_factory=Walk)

    @classmethod
    def empty(cls, steps: int) -> "Tally":
        """Nothing seen yet of `steps` draft steps."""
        return cls([0.0] * steps, [0] * steps, [0] * steps)

    def figures(self, decay: float) -> dict[str, Any]:
        """Means: loss (as in training), accuracy of each step, simulated accept length of plain rows, of loops and of all."""
        means = [loss / count for loss, count in zip(self.loss, self.slots, strict=True) if count]
        both = Walk(self.plain.cycles + self.loops.cycles, self.plain.accepted + self.loops.accepted)
        return {
            "loss": sum(decay**step * mean for step, mean in enumerate(means)),
            "step_losses": means,
            "accuracies": [hits / count for hits, count in zip(self.hits, self.slots, strict=True) if count],
            "accept_length": self.plain.accept_length,
            "accept_length_loops": self.loops.accept_length,
            "accept_length_all": both.accept_length,
            "cycles": self.plain.cycles,
            "cycles_loops": self.loops.cycles,
        }


@torch.no_grad()
def evaluate(drafter: Drafter, teacher: Teacher, batches: Iterable[Batch], steps: int, decay: float) -> dict[str, Any]:
    """Figures of `drafter` on `batches`, drafting `steps` ahead."""
    tally = Tally.empty(steps)
    for batch in batches:
        unrolled = unroll(drafter, teacher.embedding, batch, steps)
        scores = [score(drafter, teacher, batch, number, step) for number, step in enumerate(unrolled)]
        for number, (hits, loss) in enumerate(scores):
            tally.loss[number] += loss
            tally.hits[number] += int(hits.sum())
            tally.slots[number] += len(hits)
        walk_rows(batch, accepted_drafts([hits for hits, _ in scores], unrolled, len(batch.slots)), tally)
    return tally.figures(decay)


def score(drafter: Drafter, teacher: Teacher, batch: Batch, number: int, step: Step) -> tuple[Tensor, float]:
    """Which active slots [M] of `step`, the `number`-th, draft what the target chooses, and their summed loss.

    A token outside the draft vocabulary counts as a miss.
    """
    taught = step.active + number
    choices, loss = [], 0.0
    for states, index in zip(step.states.split(CHUNK_ROWS), taught.split(CHUNK_ROWS), strict=True):
        logits = drafter.logits(states).float()
        choices.append(logits.argmax(-1))
        share = torch.ones(len(index), device=logits.device)
        loss += soft_cross_entropy_(logits, teacher.probabilities(batch.final[index]), share).sum().item()
    return drafter.target_ids[torch.cat(choices)] == batch.argmax[taught], loss


def accepted_drafts(hits: Sequence[Tensor], steps: Sequence[Step], count: int) -> list[int]:
    """How many drafts a cycle that starts at each of `count` slots gets accepted: hits in a row from step 0."""
    accepted = torch.zeros(count, dtype=torch.int64, device=hits[0].device)
    running = torch.ones(count, dtype=torch.bool, device=hits[0].device)
    for step_hits, step in zip(hits, steps, strict=True):
        here = torch.zeros_like(running)
        here[step.active] = step_hits
        running &= here
        accepted += running
    return accepted.tolist()


def walk_rows(batch: Batch, accepted: Sequence[int], tally: Tally) -> None:
    """Walk every span of every row of `batch` cycle by cycle: a cycle at a slot jumps over its accepted drafts and the bonus token."""
    remaining, tokens, slots = batch.remaining.tolist(), batch.next_tokens.tolist(), batch.slots.tolist()
    first = 0
    while first < len(slots):
        end = first + remaining[first]
        span = tokens[slots[first] : slots[end - 1] + 1]
        walk = tally.loops if ends_in_loop(span) else tally.plain
        place = first
        while place < end:
            walk.cycles += 1
            walk.accepted += accepted[place]
            place += accepted[place] + 1
        first = end
