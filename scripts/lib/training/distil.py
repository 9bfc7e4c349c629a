"""Linear layer and loss in one pass over chunks of teachers: losses and gradients, never [Q, D] at once.

A chunk of teachers serves all steps that it teaches: slot q of step s has the teacher of slot q + s, so the rows of step s
are the chunk's own, shifted by s. Teacher logits are made once, student logits once; both die with the chunk.
Shapes: K steps, Q slots, H hidden size, D draft vocabulary, C teachers of a chunk, M student rows of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.lib.training.objectives import Objective

TEACHERS = 1024  # of a chunk: K times as many rows of student logits live at a time

# Losses f32[M] of student logits [M, D], which become gradients; teacher logits [C, D], their log-sum-exp f32[C],
# index i64[M] and share f32[M].
Epilogue = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


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

    def epilogue(logits: Tensor, teacher: Tensor, teacher_lse: Tensor, index: Tensor, share: Tensor) -> Tensor:
        scores = logits.float() if logits.dtype != torch.float32 else logits.clone()
        losses = judge(scores, (teacher.float() - teacher_lse[:, None]).exp_()[index], share)
        logits.copy_(scores)
        return torch.where(share > 0, losses, 0.0)

    return epilogue


def shares(remaining: Tensor, steps: int, decay: float, counts: Sequence[int]) -> Tensor:
    """What each slot counts at each step, f32[K, Q]: decay^step over the number of slots trained at it, 0 where not trained.

    `counts` are those numbers, of all batches that make one optimizer step.
    """
    weights = on_device([decay**step / max(count, 1) for step, count in enumerate(counts)], remaining.device)
    return (remaining > torch.arange(steps, device=remaining.device)[:, None]) * weights[:, None]


def on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """`values` f32[K], filled in on `device`: copying them there would wait for all work that is under way."""
    return torch.stack([torch.full((), value, dtype=torch.float32, device=device) for value in values])


@torch.no_grad()
def distil(states: Sequence[Tensor], head: Tensor, goal: Goal, epilogue: Epilogue, teachers: int = TEACHERS) -> Distilled:
    """Losses of `states` (K times [Q, H]) through `head` [D, H] against `goal`, `teachers` at a time.

    Matrix products run in the dtype of `states`; softmax, losses and the head's gradient in float32.
    """
    share, count = goal.share, len(goal.final)
    losses = torch.zeros(share.shape, device=share.device)
    grads = [torch.zeros_like(state) for state in states]
    grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
    order = torch.arange(count, device=share.device)
    for start in range(0, count, teachers):
        end = min(start + teachers, count)
        taught = [slice(max(start - step, 0), max(end - step, 0)) for step in range(len(states))]
        teacher = goal.final[start:end] @ goal.head.t()
        inputs = torch.cat([state[part] for state, part in zip(states, taught, strict=True)])
        index = torch.cat([order[part.start + step - start : part.stop + step - start] for step, part in enumerate(taught)])
        weight = torch.cat([share[step, part] for step, part in enumerate(taught)])
        logits = inputs @ head.t()
        found = epilogue(logits, teacher, teacher.float().logsumexp(-1), index, weight)
        back = logits @ head
        add_product(grad_head, logits, inputs)
        sizes = [part.stop - part.start for part in taught]
        for step, (part, loss, grad) in enumerate(zip(taught, found.split(sizes), back.split(sizes), strict=True)):
            losses[step, part] = loss
            grads[step][part] = grad
    return Distilled(losses, grads, grad_head)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left.T @ right` ([M, D] and [M, H]) to `total` f32[D, H], summed in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.t().float(), right.float())
