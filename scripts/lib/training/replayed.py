"""What a batch adds to the gradients, as CUDA graphs: one call starts all kernels of a batch.

All batches have the same shapes, so that what was recorded of one serves for the others. A small drafter's kernels are done before a host
has started them one by one (docs/measurements.md); those of a large one keep the GPU busy meanwhile, and its memory is needed elsewhere.
Shapes: K draft steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scripts.lib.eagle3.model import Drafter
from scripts.lib.training.memory import recorded
from scripts.lib.training.packed import PackedBatch
from scripts.lib.training.stepping import Recipe

Compute = Callable[[PackedBatch, Tensor], Tensor]  # of a batch and what each draft step weighs f32[K]: summed losses f32[K]


def pays(drafter: Drafter, recipe: Recipe, slots: int) -> bool:
    """Whether batches of `slots` are worth a graph: on CUDA, with all weights in one place, and with little to compute."""
    weights = sum(parameter.numel() for parameter in drafter.parameters())
    return torch.device(recipe.device).type == "cuda" and not recipe.shard and recorded(weights, slots)


@dataclass(frozen=True)
class Recorded:
    """A graph, the tensors that it reads, and those that it leaves: summed `losses` f32[K]."""

    graph: torch.cuda.CUDAGraph
    batch: PackedBatch
    weights: Tensor
    losses: Tensor

    @classmethod
    def of(cls, compute: Compute, batch: PackedBatch, weights: Tensor) -> "Recorded":
        """Record what `compute` does, without doing it. Threads that load batches go on meanwhile."""
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in batch.tensors().items()}
        kept, weights, graph = replace(batch, **copies), weights.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            losses = compute(kept, weights)
        return cls(graph, kept, weights, losses)

    def replay(self, batch: PackedBatch, weights: Tensor) -> Tensor:
        """What `compute` would do with `batch` and `weights`; good until the next call."""
        self.weights.copy_(weights)
        for name, tensor in batch.tensors().items():
            getattr(self.batch, name).copy_(tensor)
        self.graph.replay()
        return self.losses


class Replayed:
    """`compute`, recorded when it is called for the second time with a number of draft steps: the first call compiles kernels.

    It must neither wait for the device nor put what outlives the call elsewhere than the first call did. What was recorded with another
    number of draft steps goes, and its memory with it: a training does not come back to that.
    """

    def __init__(self, compute: Compute) -> None:
        self.compute, self.steps = compute, 0
        self.recorded: Recorded | None = None

    def __call__(self, batch: PackedBatch, weights: Tensor) -> Tensor:
        """Summed losses f32[K] of `batch`, with `weights` f32[K] of its draft steps."""
        if len(weights) != self.steps:
            if self.recorded:
                torch.cuda.synchronize()  # the graph that goes may still run
            self.steps, self.recorded = len(weights), None
            return self.compute(batch, weights)
        if self.recorded is None:
            self.recorded = Recorded.of(self.compute, batch, weights)
        return self.recorded.replay(batch, weights)
