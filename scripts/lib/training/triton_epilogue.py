"""The soft cross-entropy of `distil` in Triton: a program for each teacher, then one that reads a row of both logits twice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


@triton.jit
def log_sum_exp(logits, result, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    highest = -float("inf")
    total = 0.0
    for first in range(0, width, BLOCK):
        scores = tl.load(logits + row * width + first + columns, mask=first + columns < width, other=-float("inf")).to(tl.float32)
        above = tl.maximum(highest, tl.max(scores, 0))
        total = total * tl.exp(highest - above) + tl.sum(tl.exp(scores - above), 0)
        highest = above
    tl.store(result + row, highest + tl.log(total))


@triton.jit
def soft_cross_entropy(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    logits, teacher, teacher_lse, index, share, losses, width: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: its loss, and its logits overwritten by their gradient times its share."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(share + row)
    taught_by = tl.load(index + row)
    student = logits + row * width
    goal = teacher + taught_by * width
    goal_lse = tl.load(teacher_lse + taught_by)
    columns = tl.arange(0, BLOCK)
    if weight > 0:
        highest = -float("inf")
        total = 0.0
        aimed = 0.0
        for first in range(0, width, BLOCK):
            inside = first + columns < width
            scores = tl.load(student + first + columns, mask=inside, other=-float("inf")).to(tl.float32)
            wanted = tl.exp(tl.load(goal + first + columns, mask=inside, other=-float("inf")).to(tl.float32) - goal_lse)
            above = tl.maximum(highest, tl.max(scores, 0))
            total = total * tl.exp(highest - above) + tl.sum(tl.exp(scores - above), 0)
            aimed += tl.sum(wanted * tl.where(inside, scores, 0.0), 0)
            highest = above
        lse = highest + tl.log(total)
        tl.store(losses + row, lse - aimed)
        for first in range(0, width, BLOCK):
            inside = first + columns < width
            scores = tl.load(student + first + columns, mask=inside, other=-float("inf")).to(tl.float32)
            wanted = tl.exp(tl.load(goal + first + columns, mask=inside, other=-float("inf")).to(tl.float32) - goal_lse)
            gradient = (tl.exp(scores - lse) - wanted) * weight
            tl.store(student + first + columns, gradient.to(logits.dtype.element_ty), mask=inside)
    else:
        tl.store(losses + row, 0.0)
        for first in range(0, width, BLOCK):
            inside = first + columns < width
            tl.store(student + first + columns, tl.zeros([BLOCK], dtype=logits.dtype.element_ty), mask=inside)


def triton_epilogue(logits: Tensor, teacher: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """As `distil.plain_epilogue(soft_cross_entropy_)`, for contiguous tensors on CUDA."""
    losses, teacher_lse = (torch.empty(len(rows), device=logits.device) for rows in (logits, teacher))
    width = logits.shape[1]
    if len(logits):
        log_sum_exp[(len(teacher),)](teacher, teacher_lse, width, BLOCK=BLOCK, num_warps=WARPS)
        soft_cross_entropy[(len(logits),)](logits, teacher, teacher_lse, index, share, losses, width, BLOCK=BLOCK, num_warps=WARPS)
    return losses
