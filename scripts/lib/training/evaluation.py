"""What a drafter is worth on rows it has not seen. All of it stays on the device until the end.

Shapes: Q slots of a batch, M slots active at one step, K draft steps, S loss spans of a batch.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.ranks import add_up
from scripts.lib.training.repetition import ends_in_loop
from scripts.lib.training.stepping import Drafts, Stepper

PLAIN, LOOPS = 0, 1
CHUNK_ROWS = 512  # whose logits live at a time


class Tally:
    """Sums over batches: losses, hits and slots of each step [K]; verify cycles and accepted drafts [2, 2], of plain spans and of loops."""

    def __init__(self, steps: int, device: torch.device | str = "cpu") -> None:
        self.loss = torch.zeros(steps, dtype=torch.float64, device=device)
        self.hits, self.slots = (torch.zeros(steps, dtype=torch.int64, device=device) for _ in range(2))
        self.walks = torch.zeros(2, 2, dtype=torch.int64, device=device)

    def walk(self, accepted: Tensor, remaining: Tensor, loops: Tensor) -> None:
        """Walk every span of a batch; `loops` bool[S] says which ones end in a loop."""
        firsts = span_starts(remaining)
        walked = walks(accepted, remaining)[firsts]
        self.walks.index_add_(0, loops.to(accepted.device, torch.int64), walked)

    def figures(self, decay: float) -> dict[str, Any]:
        """Means: loss (as in training), accuracy of each step, simulated accept length of plain rows, of loops and of all."""
        counts = self.slots.tolist()
        means = [loss / count for loss, count in zip(self.loss.tolist(), counts, strict=True) if count]
        plain, loops = self.walks.tolist()
        return {
            "loss": sum(decay**step * mean for step, mean in enumerate(means)),
            "step_losses": means,
            "accuracies": [hits / count for hits, count in zip(self.hits.tolist(), counts, strict=True) if count],
            "accept_length": accept_length(*plain),
            "accept_length_loops": accept_length(*loops),
            "accept_length_all": accept_length(plain[0] + loops[0], plain[1] + loops[1]),
            "cycles": plain[0],
            "cycles_loops": loops[0],
        }


def accept_length(cycles: int, accepted: int) -> float | None:
    """Tokens a cycle, the target's own one included; None when no cycle was walked."""
    return 1 + accepted / cycles if cycles else None


@torch.no_grad()
def evaluate(stepper: Stepper, batches: Iterable[tuple[Any, Tensor]], steps: int) -> dict[str, Any]:
    """Figures of the stepper's drafter, `steps` ahead, on `batches`; with each comes bool[S], which of its spans end in a loop."""
    tally = Tally(steps, stepper.recipe.device)
    for batch, loops in batches:
        drafts = stepper.drafts(batch, steps)
        hits = torch.zeros(steps, len(batch.remaining), dtype=torch.bool, device=batch.remaining.device)
        for number, draft in enumerate(drafts):
            right, loss = score(stepper, batch, number, draft)
            hits[number, draft.active] = right
            tally.loss[number] += loss
            tally.slots[number] += len(right)
        tally.hits += hits.sum(1)
        tally.walk(accepted_drafts(hits), batch.remaining, loops)
    add_up(tally.loss, tally.hits, tally.slots, tally.walks)
    return tally.figures(stepper.recipe.decay)


def score(stepper: Stepper, batch: Any, number: int, draft: Drafts) -> tuple[Tensor, Tensor]:
    """Which active slots bool[M] of step `number` draft what the target chooses, and their summed loss f64.

    A token outside the draft vocabulary counts as a miss.
    """
    drafter, taught = stepper.weights.compute, draft.active + number
    choices, loss = [], torch.zeros((), dtype=torch.float64, device=taught.device)
    for states, index in zip(draft.states.split(CHUNK_ROWS), taught.split(CHUNK_ROWS), strict=True):
        logits, goal = stepper.scores(states, batch.final[index])
        choices.append(logits.argmax(-1))
        share = torch.ones(len(index), device=logits.device)
        loss += stepper.recipe.objective(logits, goal, share).sum()
    return drafter.target_ids[torch.cat(choices)] == batch.argmax[taught], loss


def accepted_drafts(hits: Tensor) -> Tensor:
    """How many drafts a cycle that starts at each slot gets accepted, i64[Q]: `hits` bool[K, Q] in a row from step 0."""
    return hits.long().cumprod(0).sum(0)


def span_starts(remaining: Tensor) -> Tensor:
    """The first slot of each span, i64[S], from `remaining` i64[Q]; filler has nothing remaining."""
    ended = torch.cat([remaining.new_ones(1), remaining[:-1]]) == 1
    return (ended & (remaining > 0)).nonzero().flatten()


def walks(accepted: Tensor, remaining: Tensor) -> Tensor:
    """Verify cycles and accepted drafts, i64[Q, 2], of walking from each slot to the end of its span.

    A cycle at a slot jumps over its `accepted` drafts and the bonus token. All slots walk at once: each round doubles how far
    their sums reach, so that a span of n slots needs log2(n) rounds.
    """
    count = len(accepted)
    own = torch.stack([torch.ones_like(accepted), accepted], 1)
    sums = torch.cat([own, own.new_zeros(1, 2)])
    place = torch.arange(count, device=accepted.device)
    jump = torch.where(accepted + 1 < remaining, place + accepted + 1, count)
    jump = torch.cat([jump, jump.new_full((1,), count)])
    for _ in range(count.bit_length()):
        sums = sums + sums[jump]
        jump = jump[jump]
    return sums[:count]


def spans_in_loops(row: TrainingRow) -> Tensor:
    """Which spans of `row` end in a loop, bool[S]: a drafter looks good on them whatever it has learnt."""
    tokens, slots, remaining = row.tokens[1:].tolist(), row.slots.tolist(), row.remaining.tolist()
    firsts: Sequence[int] = span_starts(row.remaining).tolist()
    return torch.tensor([ends_in_loop(tokens[slots[first] : slots[first + remaining[first] - 1] + 1]) for first in firsts])
