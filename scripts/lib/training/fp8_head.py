"""The drafter's output head with products of numbers in 8 bits, and the loss behind it.

The inputs that matter most are there in two pieces (`Refined`). What that is worth is in docs/measurements.md.
Shapes: M rows, Q slots, D draft vocabulary, H hidden size, R inputs in two pieces.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.lib.training.distil import Epilogue
from scripts.lib.training.fp8_numbers import E4M3, Rounded, rounded
from scripts.lib.training.fp8_products import scaled, weight_gradient

KEPT = 64  # inputs in two pieces
TEACHERS = 2304  # of a chunk at most: no product in 8 bits adds to a sum, so that the weight's gradient takes a pass of its own for each

# Losses f32[M] as of a `distil.Epilogue`, and the gradients of logits, rounded.
Fp8Epilogue = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Rounded]]


class Refined(NamedTuple):
    """A head [D, H] as its products take it: `rows` [D, H + 2R] for logits, `columns` [H, D] for gradients of states.

    Logits are differences of large sums, to which a few inputs give most; those that give most, `kept` i64[R], are there in two pieces, so
    that they have 8 bits where others have 4.
    """

    rows: Rounded
    columns: Rounded
    kept: Tensor


class HeadKernels(NamedTuple):
    """The functions of these names, plain or compiled; `logits` and `gradients` are the head's."""

    refined: Callable[[Tensor, Tensor], Refined]
    logits: Callable[[Tensor, Rounded, Tensor], Tensor]
    gradients: Callable[[Rounded, Tensor, Rounded, Tensor], Tensor]
    rounded: Callable[[Tensor], Rounded]


class Fp8Head:
    """As `distil.PlainHead`, its `weight` [D, H] refined for `states` [Q, H] and others like them."""

    teachers = TEACHERS

    def __init__(self, kernels: HeadKernels, epilogue: Fp8Epilogue, weight: Tensor, states: Tensor) -> None:
        self.kernels, self.epilogue, self.refined = kernels, epilogue, kernels.refined(weight, states)
        self.gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def learn(self, states: Tensor, teacher: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """As `distil.Head` says."""
        logits = self.kernels.logits(states, self.refined.rows, self.refined.kept)
        losses, slopes = self.epilogue(logits, teacher, share)
        return losses, self.kernels.gradients(slopes, states, self.refined.columns, self.gradient)


def rounding(epilogue: Epilogue, kernels: HeadKernels) -> Fp8Epilogue:
    """`epilogue`, and its gradients rounded."""

    def judged(logits: Tensor, teacher: Tensor, share: Tensor) -> tuple[Tensor, Rounded]:
        return epilogue(logits, teacher, share), kernels.rounded(logits)

    return judged


def refined(weight: Tensor, states: Tensor) -> Refined:
    """The head `weight` [D, H] for `states` [Q, H], which say what inputs give most."""
    given = states.float().square().mean(0) * weight.float().square().mean(0)
    kept = given.topk(min(KEPT, len(given))).indices
    rows, high, low = pieces(weight, kept)
    return Refined(joined(rows, high, low), rounded(weight.t().contiguous()), kept)


def head_logits(states: Tensor, rows: Rounded, kept: Tensor) -> Tensor:
    """[M, D] of `states` [M, H] and the `rows` [D, H + 2R] of a head that has some inputs in two pieces, `kept` i64[R]."""
    made, high, low = pieces(states, kept)
    return scaled(joined(made, low, high), rows, states.dtype)


def pieces(rows: Tensor, kept: Tensor) -> tuple[Rounded, Tensor, Tensor]:
    """`rows` [M, K] rounded; of those `kept` i64[R] of K, what they have become, and what that leaves: e4m3 [M, R]."""
    made = rounded(rows)
    high = made.numbers.view(torch.uint8).index_select(1, kept).view(E4M3)
    low = (rows.index_select(1, kept) * made.scale.reciprocal() - high.float()).to(E4M3)
    return made, high, low


def joined(rows: Rounded, *more: Tensor) -> Rounded:
    """`rows` [M, K], and `more` numbers [M, R] of the same scale behind them."""
    parts = [part.view(torch.uint8) for part in (rows.numbers, *more)]
    return Rounded(torch.cat(parts, 1).view(E4M3), rows.scale)


def head_gradients(slopes: Rounded, states: Tensor, columns: Rounded, total: Tensor) -> Tensor:
    """The gradient [M, H] of `states` [M, H] for `slopes` [M, D] of their logits; the head's is added to `total` f32[D, H]."""
    total += weight_gradient(slopes, rounded(states), torch.float32)
    return scaled(slopes, columns, states.dtype)


HEAD = HeadKernels(refined, head_logits, head_gradients, rounded)
