"""Steps row by row with queries at trained positions only: no filler, nothing to compile, what a CPU wants."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.lib.eagle3.model import Drafter
from scripts.lib.training.batches import Batch, collate
from scripts.lib.training.loss import Teacher, unrolled_loss
from scripts.lib.training.masters import Masters
from scripts.lib.training.ranks import add_up
from scripts.lib.training.stepping import Drafts, Recipe, Run, StepFigures
from scripts.lib.training.unroll import unroll


class RowStep:
    """A `Stepper` for any device. Weights and the residual stream are float32, matrix products of the recipe's dtype."""

    def __init__(self, drafter: Drafter, teacher: Teacher, recipe: Recipe) -> None:
        self.weights = Masters(drafter.to(recipe.device), torch.float32)
        self.teacher, self.recipe = teacher.to(recipe.device), recipe

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Arithmetic of matrix products."""
        if self.recipe.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.recipe.device).type, self.recipe.dtype)

    def load(self, runs: Sequence[Run]) -> Iterator[Batch]:
        """A batch for each of `runs`, made when it is asked for."""
        return (collate(rows, torch.float32, self.recipe.device) for rows in runs)

    def train(self, batches: Iterable[Batch], counts: Sequence[int], learning_rate: float) -> StepFigures:
        """One optimizer step; `counts` are the slots trained at each draft step in all `batches` together."""
        weights = [self.recipe.decay**step / count for step, count in enumerate(counts) if count]
        total, sums = torch.zeros((), device=self.recipe.device), torch.zeros(len(counts), device=self.recipe.device)
        for batch in batches:
            with self.precision():
                probabilities = self.teacher.probabilities(batch.final)
                unrolled = unroll(self.weights.masters, self.teacher.embedding, batch, len(counts))
                loss, found = unrolled_loss(unrolled, self.weights.masters, probabilities, weights, self.recipe.objective)
            loss.backward()
            total += loss.detach()
            sums[: len(found)] += found
        add_up(total, sums)
        means = sums / torch.tensor([max(count, 1) for count in counts], device=sums.device)
        return StepFigures(total, means, self.weights.step(learning_rate, self.recipe.clip))

    @torch.no_grad()
    def drafts(self, batch: Batch, steps: int) -> list[Drafts]:
        """The drafter's states in `steps` steps from every slot of `batch`."""
        drafter = self.weights.masters
        with self.precision():
            return [Drafts(drafter.norm(step.states), step.active) for step in unroll(drafter, self.teacher.embedding, batch, steps)]

    def scores(self, states: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Logits f32[M, D] of `states` [M, H] and the probabilities f32[M, D] that teach them."""
        with self.precision():
            return self.weights.masters.lm_head(states).float(), self.teacher.probabilities(final)
