"""Linear layer and loss in one pass over chunks of teachers: losses and gradients, never [Q, D] at once.

A chunk of teachers serves all steps that it teaches: slot q of step s has the teacher of slot q + s, so that states are moved
to their teachers beforehand, and a chunk is one stretch of all steps. Rows behind the last teacher, and those that a move leaves empty,
count nothing. Teacher logits are made once, student logits once; both die with the chunk.
Shapes: K steps, Q slots, H hidden size, D draft vocabulary, C teachers of a chunk, M student rows of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.lib.training.objectives import Objective

TEACHERS = 1024  # of a chunk: K times as many rows of student logits live at a time

# Losses f32[M] of student logits [M, D], which become gradients; teacher logits [C, D], index i64[M] and share f32[M].
Epilogue = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


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


def plain_epilogue(judge: Objective) -> Epilogue:
    """Any objective with torch operations; the student's logits are overwritten by their gradient times `share`."""

    def epilogue(logits: Tensor, teacher: Tensor, index: Tensor, share: Tensor) -> Tensor:
        scores = logits.float() if logits.dtype != torch.float32 else logits.clone()
        losses = judge(scores, torch.softmax(teacher, -1, dtype=torch.float32)[index], share)
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
def distil(states: Sequence[Tensor], head: Tensor, goal: Goal, epilogue: Epilogue, teachers: int = TEACHERS) -> Distilled:
    """Losses of `states` (K times [Q, H]) through `head` [D, H] against `goal`, `teachers` at a time.

    Matrix products run in the dtype of `states`; softmax, losses and the head's gradient in float32.
    """
    steps, count = goal.share.shape
    by_teacher, share = shifted(states), shifted(goal.share)
    losses = torch.zeros_like(share)
    grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
    index = torch.arange(min(teachers, count), device=share.device).repeat(steps, 1)
    for start in range(0, count, teachers):
        here = slice(start, min(start + teachers, count))
        size = here.stop - here.start
        teacher = goal.final[here] @ goal.head.t()
        inputs = by_teacher[:, here].flatten(0, 1)
        logits = inputs @ head.t()
        found = epilogue(logits, teacher, index[:, :size].flatten(), share[:, here].flatten())
        add_product(grad_head, logits, inputs)
        losses[:, here] = found.view(steps, size)
        by_teacher[:, here] = (logits @ head).view(steps, size, -1)  # gradients take the memory of the states that they are of
    by_teacher[:, count:] = 0
    return Distilled(torch.stack(unshifted(losses, count)), unshifted(by_teacher, count), grad_head)


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
