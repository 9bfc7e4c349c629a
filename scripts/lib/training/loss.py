"""Losses against the target on the draft vocabulary, and their gradients, in chunks of teachers; for a CPU.

The logits of a chunk are made once, become their gradients where they lie, and die with the chunk.
Shapes: Q slots, M draft states of all steps together, K steps, H hidden size, D draft vocabulary, V target vocabulary;
C teachers and m states of a chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from scripts.lib.training.objectives import Objective
from scripts.lib.training.products import Operands, add_product, gradient
from scripts.lib.training.unroll import Step

CHUNK_LOGITS = 2**24  # of the drafter, at a time: 64 MiB in float32
BLOCK_ROWS = 32  # of logits that are judged at a time, so that they stay in a cache from one pass to the next


@dataclass(frozen=True)
class Teacher:
    """What the frozen target gives to training: its token embedding [V, H] and the draft rows [D, H] of its head."""

    embedding: Tensor
    head: Tensor

    def probabilities(self, final: Tensor) -> Tensor:
        """What the target gives each draft token, f32[Q, D], renormalised over the draft vocabulary.

        `final` [Q, H] are the target's states after its last norm.
        """
        return torch.softmax(final.to(self.head.dtype) @ self.head.T, -1, dtype=torch.float32)


@dataclass(frozen=True)
class Lesson:
    """What teaches: the target's `final` states [Q, H] and the draft rows [D, H] of its head; what the losses of each step weigh."""

    final: Tensor
    head: Tensor
    weights: Sequence[float]
    judge: Objective


class Board:
    """Memory for the logits of a chunk that is used again for the next: fresh memory costs a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def space(self, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
        """[rows, columns] of dtype and device of `like`, filled with what was there; what was handed out under `name` is lost."""
        if name not in self.held or len(self.held[name]) < rows * columns:
            self.held[name] = like.new_empty(rows * columns)
        return self.held[name][: rows * columns].view(rows, columns)


def learn(operands: Operands, unrolled: Sequence[Step], lesson: Lesson, board: Board) -> Tensor:
    """Add to the drafter's gradients those of the losses of `unrolled`; the summed losses f32[K] of each step.

    Slot q at step s is taught by final state q + s.
    """
    states = operands.norm(torch.cat([step.states for step in unrolled]), operands.drafter.norm)
    taught = torch.cat([step.active + number for number, step in enumerate(unrolled)])
    counts = [len(step.active) for step in unrolled]
    share = torch.cat([torch.full((count,), weight, device=taught.device) for weight, count in zip(lesson.weights, counts, strict=False)])
    losses, back = torch.empty_like(share), torch.empty_like(states)
    with torch.no_grad():
        rows, limit = states.detach().to(operands.dtype), max(CHUNK_LOGITS // (len(counts) * len(lesson.head)), 1)
        size = ceil(len(lesson.final) / ceil(len(lesson.final) / limit))
        for start in range(0, len(lesson.final), size):
            part = ((taught >= start) & (taught < start + size)).nonzero().flatten()
            goals = probabilities(lesson, slice(start, start + size), board)
            losses[part], back[part] = judged(operands, rows[part], (goals, taught[part] - start), (lesson.judge, share[part]), board)
    states.backward(back)
    return torch.stack([part.sum() for part in losses.split(counts)])


def probabilities(lesson: Lesson, part: slice, board: Board) -> Tensor:
    """What the target gives each draft token, f32[C, D], for the `part` of the final states."""
    final = lesson.final[part].to(lesson.head.dtype)
    logits = torch.mm(final, lesson.head.T, out=board.space("teacher", len(final), len(lesson.head), final))
    goals = (
        board.space("goals", len(logits), len(lesson.head), logits.new_empty(0, dtype=torch.float32))
        if logits.dtype != torch.float32
        else logits
    )
    for start in range(0, len(logits), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        goals[block] = torch.softmax(logits[block], -1, dtype=torch.float32)
    return goals


def judged(
    operands: Operands, states: Tensor, teachers: tuple[Tensor, Tensor], judge: tuple[Objective, Tensor], board: Board
) -> tuple[Tensor, Tensor]:
    """Losses f32[m] of normed `states` [m, H] and the gradient to them f32[m, H]; the head's is added up in place.

    `teachers` are probabilities f32[C, D] and which of them teaches each state, i64[m]; `judge` an objective and what each
    state's loss weighs, f32[m].
    """
    (goals, taught), (objective, share) = teachers, judge
    weight = operands.drafter.lm_head.weight
    head = operands.of(weight)
    logits = torch.mm(states, head.T, out=board.space("drafter", len(states), len(head), states))
    losses = torch.empty_like(share)
    for block, first in blocks(taught):
        scores = logits[block].float()
        losses[block] = objective(scores, goals[first : first + len(scores)], share[block])
        if scores.dtype != logits.dtype:
            logits[block] = scores
    add_product(gradient(weight), logits, states)
    return losses, (logits @ head).float()


def blocks(taught: Tensor) -> Iterator[tuple[slice, int]]:
    """Slices of `taught` i64[m] with numbers that follow each other, and the first number of each."""
    numbers = taught.tolist()
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or place - start == BLOCK_ROWS or numbers[place] != numbers[place - 1] + 1:
            yield slice(start, place), numbers[start]
            start = place
