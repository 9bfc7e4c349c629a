"""Linear layer and loss in one pass over chunks of teachers: losses and gradients, never [Q, D] at once.

A chunk of teachers serves all steps that it teaches: slot q of step s has the teacher of slot q + s, so that states are moved
to their teachers beforehand, and a chunk is one stretch of all steps. Rows behind the last teacher, and those that a move leaves empty,
count nothing. Teacher logits are made once, student logits once; both die with the chunk.
Shapes: K steps, Q slots, H hidden size, D draft vocabulary, C teachers of a chunk, M student rows of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from scripts.lib.training.fp8_numbers import MULTIPLE
from scripts.lib.training.objectives import Objective

TEACHERS = 1152  # of a chunk at most: K times as many rows of student logits live at a time; eight hold 8,192 slots and their filler

# Losses f32[M] of student logits [M, D], which become gradients, by teacher logits [C, D] and share f32[M]. Row m has teacher m % C.
Epilogue = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Goal:
    """The target's states `final` [Q, H], the draft rows [D, H] of its head, and what each slot counts at each step, f32[K, Q]."""

    final: Tensor
    head: Tensor
    share: Tensor


@dataclass(frozen=True)
class Distilled:
    """`losses` f32[K, Q] of every slot, and gradients of their weighted sum: of `states`, K times [Q, H], and of the head f32[D, H]."""

    losses: Tensor
    states: list[Tensor]
    head: Tensor


class Head(Protocol):
    """The drafter's output head and the loss behind it, for one batch.

    `gradient` f32[D, H] is what has been added up of the head's own, `teachers` how many of them a chunk has at most.
    """

    gradient: Tensor
    teachers: int

    def learn(self, states: Tensor, teacher: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Losses f32[M] of `states` [M, H] by logits `teacher` [C, D], and the gradient [M, H] of their sum, weighed by `share` f32[M].

        Row m has teacher m % C.
        """
        ...


class PlainHead:
    """A head whose products are in the dtype of its `weight` [D, H]; its gradient is in float32."""

    teachers = TEACHERS

    def __init__(self, epilogue: Epilogue, weight: Tensor) -> None:
        self.epilogue, self.weight = epilogue, weight
        self.gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def learn(self, states: Tensor, teacher: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """As `Head` says."""
        logits = states @ self.weight.t()
        losses = self.epilogue(logits, teacher, share)
        add_product(self.gradient, logits, states)
        return losses, logits @ self.weight


def plain_epilogue(judge: Objective) -> Epilogue:
    """Any objective with torch operations; the student's logits are overwritten by their gradient times `share`."""

    def epilogue(logits: Tensor, teacher: Tensor, share: Tensor) -> Tensor:
        scores = logits.float() if logits.dtype != torch.float32 else logits.clone()
        goals = torch.softmax(teacher, -1, dtype=torch.float32).repeat(len(logits) // len(teacher), 1)
        losses = judge(scores, goals, share)
        logits.copy_(scores)
        return torch.where(share > 0, losses, 0.0)

    return epilogue


def shares(remaining: Tensor, weights: Tensor) -> Tensor:
    """What each slot counts at each step, f32[K, Q]: the step's of `weights` f32[K], 0 where it is not trained."""
    return (remaining > torch.arange(len(weights), device=remaining.device)[:, None]) * weights[:, None]


def on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """`values` f32[K], filled in on `device`: copying them there would wait for all work that is under way."""
    return torch.stack([torch.full((), value, dtype=torch.float32, device=device) for value in values])


@torch.no_grad()
def distil(states: Sequence[Tensor], head: Head, goal: Goal) -> Distilled:
    """Losses of `states` (K times [Q, H]) through `head` against `goal`, chunk by chunk.

    Teachers are made in the dtype of `states`; softmax and losses in float32.
    """
    steps, count = goal.share.shape
    by_teacher, share = shifted(states), shifted(goal.share)
    losses = torch.zeros_like(share)
    for here in chunks(count, head.teachers):
        teacher = goal.final[here] @ goal.head.t()
        found, back = head.learn(by_teacher[:, here].flatten(0, 1), teacher, share[:, here].flatten())
        losses[:, here] = found.view(steps, -1)
        by_teacher[:, here] = back.view(steps, len(teacher), -1)  # gradients take the memory of the states that they are of
    by_teacher[:, count:] = 0
    return Distilled(torch.stack(unshifted(losses, count)), unshifted(by_teacher, count), head.gradient)


def chunks(count: int, teachers: int) -> list[slice]:
    """The fewest chunks of `count` of up to `teachers`, equal to a `MULTIPLE`: a short one would cost nearly as much as a long one."""
    blocks, number = -(-count // MULTIPLE), -(-count // teachers)
    ends = [min(blocks * part // number * MULTIPLE, count) for part in range(number + 1)] if number else [0]
    return [slice(start, end) for start, end in pairwise(ends)]


def shifted(values: Sequence[Tensor] | Tensor) -> Tensor:
    """[K, Q + K - 1, …] of K `values` [Q, …]: those of step s stand s places further on, at their teachers; zeros elsewhere."""
    steps, count = len(values), len(values[0])
    wide = values[0].new_zeros(steps, count + steps - 1, *values[0].shape[1:])
    for step, own in enumerate(values):
        wide[step, step : step + count] = own
    return wide


def unshifted(wide: Tensor, count: int) -> list[Tensor]:
    """For each step the values [Q, …] that `shifted` moved, Q being `count`."""
    return [own[step : step + count] for step, own in enumerate(wide)]


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left.T @ right` ([M, D] and [M, H]) to `total` f32[D, H], summed in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.t().float(), right.float())
