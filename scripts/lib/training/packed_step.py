"""Steps over packed batches of one shape, for compiled kernels. Nothing here waits for the device: figures come back as tensors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from scripts.lib.eagle3.model import Drafter
from scripts.lib.training.distil import Epilogue, Goal, Head, PlainHead, distil, on_device, plain_epilogue, shares
from scripts.lib.training.fp8_head import HEAD, Fp8Head, HeadKernels, rounding
from scripts.lib.training.loader import packed_batches
from scripts.lib.training.loss import Teacher
from scripts.lib.training.masters import DrafterWeights, Masters
from scripts.lib.training.objectives import soft_cross_entropy_
from scripts.lib.training.packed import Capacity, PackedBatch
from scripts.lib.training.packed_unroll import Kernels, compiled, compiled_kernels, plain_kernels, unroll_packed
from scripts.lib.training.ranks import add_up
from scripts.lib.training.replayed import Replayed, pays
from scripts.lib.training.stepping import Drafts, Recipe, Run, StepFigures


@dataclass(frozen=True)
class Engine:
    """The kernels of a device, and what makes a head of its weight [D, H] for states like those [Q, H] of the first draft step."""

    kernels: Kernels
    head: Callable[[Tensor, Tensor], Head]

    @classmethod
    def of(cls, recipe: Recipe) -> "Engine":
        """Compiled kernels on CUDA, torch operations elsewhere. Only the usual objective has a kernel of its own."""
        plain = plain_epilogue(recipe.objective)
        if torch.device(recipe.device).type != "cuda":
            kernels = plain_kernels(recipe.recompute, recipe.fp8)
            return cls(kernels, partial(Fp8Head, HEAD, rounding(plain, HEAD)) if recipe.fp8 else plain_head(plain))
        # Triton is there with CUDA only.
        from scripts.lib.training.triton_epilogue import triton_epilogue, triton_fp8_epilogue

        # Joining attention compiles once for each number of own keys.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        soft, kernels = recipe.objective is soft_cross_entropy_, compiled_kernels(recipe.recompute, recipe.fp8)
        if not recipe.fp8:
            return cls(kernels, plain_head(triton_epilogue if soft else plain))
        products = HeadKernels(*(compiled(kernel) for kernel in HEAD))
        return cls(kernels, partial(Fp8Head, products, triton_fp8_epilogue if soft else rounding(plain, products)))


def plain_head(epilogue: Epilogue) -> Callable[[Tensor, Tensor], Head]:
    """Makes heads that are the same for all states."""
    return lambda weight, _states: PlainHead(epilogue, weight)


class PackedStep:
    """A `Stepper` on batches of one fixed `capacity`: weights are float32, states and matrix products of the recipe's dtype."""

    def __init__(self, drafter: Drafter, teacher: Teacher, recipe: Recipe, capacity: Capacity) -> None:
        replays = pays(drafter, recipe, capacity.slots)
        self.weights = new_weights(drafter.to(recipe.device), recipe, replays)
        embedding, head = (weight.to(recipe.device, recipe.dtype) for weight in (teacher.embedding, teacher.head))
        self.teacher, self.recipe, self.capacity = Teacher(embedding, head), recipe, capacity
        self.engine = Engine.of(recipe)
        self.add_gradients = Replayed(self.gradients) if replays else self.gradients

    def load(self, runs: Sequence[Run]) -> Iterator[PackedBatch]:
        """A batch for each of `runs`; the next ones are made while one is used."""
        return packed_batches(runs, self.capacity, self.recipe.dtype, self.recipe.device)

    def train(self, batches: Iterable[PackedBatch], counts: Sequence[int], learning_rate: float) -> StepFigures:
        """One optimizer step; `counts` are the slots trained at each draft step in all `batches` together."""
        device = self.teacher.head.device
        sums = torch.zeros(len(counts), device=device)
        slots = on_device([max(count, 1) for count in counts], device)
        decay = on_device([self.recipe.decay**step for step in range(len(counts))], device)
        weights = decay / slots
        for batch in batches:
            sums += self.add_gradients(batch, weights)
        add_up(sums)
        norm = self.weights.step(learning_rate, self.recipe.clip)
        means = sums / slots
        return StepFigures((means * decay).sum(), means, norm)

    def gradients(self, batch: PackedBatch, weights: Tensor) -> Tensor:
        """Add the gradients of `batch`, whose slots count `weights` f32[K] at each draft step; its summed losses f32[K]."""
        states = self.weights.run(unroll_packed, self.teacher.embedding, batch, len(weights), self.engine.kernels)
        fixed = [state.detach() for state in states]
        head = self.engine.head(self.weights.compute.lm_head.weight.detach(), fixed[0])  # whole by now, where ranks share it
        found = distil(fixed, head, Goal(batch.final, self.teacher.head, shares(batch.remaining, weights)))
        self.weights.backward(states, found.states, found.head)
        return found.losses.sum(1)

    def drafts(self, batch: PackedBatch, steps: int) -> list[Drafts]:
        """The drafter's states in `steps` steps from every slot of `batch`.

        Run as in training, with a graph that is dropped: kernels compiled without one would be others.
        """
        with torch.enable_grad():
            states = self.weights.run(unroll_packed, self.teacher.embedding, batch, steps, self.engine.kernels)
        active = [(batch.remaining > step).nonzero().flatten() for step in range(steps)]
        return [Drafts(state.detach()[here], here) for state, here in zip(states, active, strict=True)]

    def scores(self, states: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Logits f32[M, D] of `states` [M, H] and the probabilities f32[M, D] that teach them."""
        return self.weights.compute.lm_head(states).float(), self.teacher.probabilities(final)


def new_weights(drafter: Drafter, recipe: Recipe, replays: bool) -> DrafterWeights:
    """The weights of `drafter` whole on this rank, or spread over all of them. A graph that `replays` finds gradients where they were."""
    if not recipe.shard:
        return Masters(drafter, recipe.dtype, recipe.optimizer, keep=replays or torch.device(recipe.device).type == "cpu")
    from scripts.lib.training.sharded import ShardedMasters  # takes a second to import, for which most runs have no use

    return ShardedMasters(drafter, recipe.dtype)
