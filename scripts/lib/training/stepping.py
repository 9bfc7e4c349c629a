"""What the training loop asks of a device: load batches, make a step, draft for the evaluation.

Shapes: K draft steps, Q slots of a batch, M slots active at one step, H hidden size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.loss import Teacher
from scripts.lib.training.masters import DrafterWeights
from scripts.lib.training.objectives import Objective
from scripts.lib.training.optimizers import ADAMW

Run = Iterable[TrainingRow]  # rows of one batch, which may have to be waited for: gone through once, when the batch is made


@dataclass(frozen=True)
class Recipe:
    """`dtype` of matrix products, the device, how draft steps and slots are weighed, and where gradients are clipped.

    `recompute`: a draft step is computed again in the backward pass. `shard`: ranks share masters, gradients and optimizer.
    `optimizer` is adamw or muon. `fp8`: the products of decoder layers and head are made of numbers in 8 bits.
    """

    dtype: torch.dtype
    device: str
    decay: float
    clip: float
    objective: Objective
    recompute: bool = False
    shard: bool = False
    optimizer: str = ADAMW
    fp8: bool = False


@dataclass(frozen=True)
class StepFigures:
    """Of one optimizer step, still on the device: the loss, its mean at each draft step f32[K], the gradient's norm before clipping."""

    loss: Tensor
    means: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Drafts:
    """States [M, H] of one draft step behind the last norm, of the slots `active` i64[M] (indices into the Q slots)."""

    states: Tensor
    active: Tensor


class Stepper(Protocol):
    """Steps of one drafter on one device. Batches are its own kind; all have `remaining`, `final` and `argmax` of their slots."""

    teacher: Teacher
    recipe: Recipe

    @property
    def weights(self) -> DrafterWeights:
        """The drafter that is trained."""
        ...

    def load(self, runs: Sequence[Run]) -> Iterator[Any]:
        """A batch on the device for each of `runs`, in order."""
        ...

    def train(self, batches: Iterable[Any], counts: Sequence[int], learning_rate: float) -> StepFigures:
        """One optimizer step on `batches`; `counts` are the slots trained at each draft step in all of them together."""
        ...

    def drafts(self, batch: Any, steps: int) -> list[Drafts]:
        """What the drafter drafts in `steps` steps from every slot of `batch`; steps with no slot left may be missing."""
        ...

    def scores(self, states: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Logits f32[M, D] of states [M, H] behind the last norm, and the probabilities f32[M, D] that teach them, of `final` [M, H]."""
        ...
