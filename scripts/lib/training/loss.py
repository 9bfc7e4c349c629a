"""Losses against the target on the draft vocabulary, without logits of more than one chunk at a time.

Shapes: Q slots, M draft states of all steps together, H hidden size, D draft vocabulary, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scripts.lib.eagle3.model import Drafter
from scripts.lib.training.objectives import Objective
from scripts.lib.training.unroll import Step

CHUNK_ROWS = 512  # logits of a chunk stay under 32 MiB at D = 8192: larger blocks are mapped afresh by the C library at every use


@dataclass(frozen=True)
class Teacher:
    """What the frozen target gives to training: its token embedding [V, H] and the draft rows [D, H] of its head."""

    embedding: Tensor
    head: Tensor

    def to(self, device: str) -> "Teacher":
        """The same on `device`."""
        return Teacher(self.embedding.to(device), self.head.to(device))

    def probabilities(self, final: Tensor) -> Tensor:
        """What the target gives each draft token, f32[Q, D], renormalised over the draft vocabulary.

        `final` [Q, H] are the target's states after its last norm.
        """
        return torch.softmax((final @ self.head.T).float(), -1)


@dataclass(frozen=True)
class Lesson:
    """Row m of M is taught by `probabilities[index[m]]` f32[D], judged by `judge`, and counts `share[m]`."""

    probabilities: Tensor
    index: Tensor
    share: Tensor
    judge: Objective


class Judged(torch.autograd.Function):
    """The objective of `states @ weight.T` against a lesson.

    Gradients are made in the forward pass chunk by chunk, for the weighted sum of rows, so no chunk is built twice.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """The weighted sum (scalar) and the rows' own losses f32[M] of normed `states` [M, H] and head `weight` [D, H].

        Matrix products run in the dtype of autocast, or else in that of `states`; softmax and sums in float32.
        """
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        head, grad_states, grad_weight = weight.to(dtype), torch.empty_like(states, dtype=torch.float32), torch.zeros_like(weight)
        losses = torch.empty(len(states), device=states.device)
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(states), CHUNK_ROWS):
                part = slice(start, start + CHUNK_ROWS)
                inputs = states[part].to(dtype)
                logits = (inputs @ head.T).float()
                losses[part] = lesson.judge(logits, lesson.probabilities[lesson.index[part]], lesson.share[part])
                gradient = logits.to(dtype)
                grad_states[part] = gradient @ head
                grad_weight += gradient.T @ inputs
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.mark_non_differentiable(losses)
        return (losses * lesson.share).sum(), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass made by `grad`, a scalar."""
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states * grad, grad_weight * grad, None


def unrolled_loss(
    steps: Sequence[Step], drafter: Drafter, probabilities: Tensor, weights: Sequence[float], judge: Objective
) -> tuple[Tensor, Tensor]:
    """Sum over steps s of `weights[s]` times the summed loss of the slots trained at s; and those sums f32[K].

    `probabilities` [Q, D] of the teacher; slot q at step s is taught by row q + s.
    """
    states = drafter.norm(torch.cat([step.states for step in steps]))
    index = torch.cat([step.active + number for number, step in enumerate(steps)])
    counts = [len(step.active) for step in steps]
    share = torch.cat([torch.full((count,), weight, device=index.device) for weight, count in zip(weights, counts, strict=False)])
    total, losses = Judged.apply(states, drafter.lm_head.weight, Lesson(probabilities, index, share, judge))
    return total, torch.stack([part.sum() for part in losses.split(counts)])
