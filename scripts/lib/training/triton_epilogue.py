"""The soft cross-entropy of `distil` as one Triton kernel: a program reads a row of student and teacher logits twice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


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


def triton_epilogue(logits: Tensor, teacher: Tensor, teacher_lse: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """As `distil.plain_epilogue(soft_cross_entropy_)`, for contiguous tensors on CUDA."""
    losses = torch.empty(len(logits), device=logits.device)
    if len(logits):
        soft_cross_entropy[(len(logits),)](
            logits, teacher, teacher_lse, index, share, losses, logits.shape[1], BLOCK=BLOCK, num_warps=WARPS
        )
    return losses
