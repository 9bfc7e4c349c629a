"""Steps row by row with queries at trained positions only: no filler, nothing to compile, what a CPU wants."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from scripts.lib.eagle3.model import Drafter
from scripts.lib.training.batches import Batch, collate
from scripts.lib.training.loss import Board, Lesson, Teacher, learn
from scripts.lib.training.masters import Masters
from scripts.lib.training.products import Operands
from scripts.lib.training.ranks import add_up
from scripts.lib.training.stepping import Drafts, Recipe, Run, StepFigures
from scripts.lib.training.unroll import unroll


class RowStep:
    """A `Stepper` for any device. Weights are float32, matrix products of the recipe's dtype."""

    def __init__(self, drafter: Drafter, teacher: Teacher, recipe: Recipe) -> None:
        self.weights = Masters(drafter.to(recipe.device), torch.float32, recipe.optimizer)
        self.teacher = Teacher(teacher.embedding.to(recipe.device), teacher.head.to(recipe.device, recipe.dtype))
        self.recipe, self.board = recipe, Board()

    def operands(self) -> Operands:
        """The drafter's weights as they are now."""
        return Operands(self.weights.masters, self.recipe.dtype)

    def load(self, runs: Sequence[Run]) -> Iterator[Batch]:
        """A batch for each of `runs`, made when it is asked for."""
        return (collate(list(rows), self.recipe.dtype, self.recipe.device) for rows in runs)

    def train(self, batches: Iterable[Batch], counts: Sequence[int], learning_rate: float) -> StepFigures:
        """One optimizer step; `counts` are the slots trained at each draft step in all `batches` together."""
        recipe, operands = self.recipe, self.operands()
        weights = [recipe.decay**step / count for step, count in enumerate(counts) if count]
        sums = torch.zeros(len(counts), device=recipe.device)
        for batch in batches:
            unrolled = unroll(operands, self.teacher.embedding, batch, len(counts))
            found = learn(operands, unrolled, Lesson(batch.final, self.teacher.head, weights, recipe.objective), self.board)
            sums[: len(found)] += found
        add_up(sums)
        total = sums[: len(weights)] @ torch.tensor(weights, device=sums.device)
        means = sums / torch.tensor([max(count, 1) for count in counts], device=sums.device)
        return StepFigures(total, means, self.weights.step(learning_rate, recipe.clip))

    @torch.no_grad()
    def drafts(self, batch: Batch, steps: int) -> list[Drafts]:
        """The drafter's states in `steps` steps from every slot of `batch`."""
        operands, norm = self.operands(), self.weights.masters.norm
        return [Drafts(operands.norm(step.states, norm), step.active) for step in unroll(operands, self.teacher.embedding, batch, steps)]

    @torch.no_grad()
    def scores(self, states: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Logits f32[M, D] of `states` [M, H] and the probabilities f32[M, D] that teach them."""
        operands = self.operands()
        return operands.product(states, self.weights.masters.lm_head.weight).float(), self.teacher.probabilities(final)
