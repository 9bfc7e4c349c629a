"""The soft cross-entropy of `distil` in Triton: a program for each teacher, then one that reads a row of both logits twice.

Programs of one teacher follow each other, so that its logits come from memory once. Gradients go where the logits were, or, for products of
numbers in 8 bits, rounded to memory of their own: the row is then read once more, for the largest of them.
Shapes: M rows of K draft steps, C teachers, D draft vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from scripts.lib.training.fp8_numbers import E4M3, Rounded
from scripts.lib.training.triton_fp8 import scale_of

BLOCK, WARPS = 8192, 8


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
    logits,
    teacher,
    teacher_lse,
    share,
    losses,
    slopes,
    scales,
    teachers,
    steps,
    width: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its loss, and the gradient of its logits times its share in `slopes`; if `FP8`, over a scale that goes into `scales`."""
    taught_by = tl.program_id(0).to(tl.int64) // steps
    row = tl.program_id(0) % steps * teachers + taught_by
    weight = tl.load(share + row)
    student = logits + row * width
    result = slopes + row * width
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
        if FP8:
            largest = 0.0
            for first in range(0, width, BLOCK):
                inside = first + columns < width
                scores = tl.load(student + first + columns, mask=inside, other=-float("inf")).to(tl.float32)
                wanted = tl.exp(tl.load(goal + first + columns, mask=inside, other=-float("inf")).to(tl.float32) - goal_lse)
                largest = tl.maximum(largest, tl.max(tl.abs(tl.exp(scores - lse) - wanted), 0))
            scale = scale_of(weight * largest)
            tl.store(scales + row, scale)
            weight = weight / scale
        for first in range(0, width, BLOCK):
            inside = first + columns < width
            scores = tl.load(student + first + columns, mask=inside, other=-float("inf")).to(tl.float32)
            wanted = tl.exp(tl.load(goal + first + columns, mask=inside, other=-float("inf")).to(tl.float32) - goal_lse)
            gradient = (tl.exp(scores - lse) - wanted) * weight
            tl.store(result + first + columns, gradient.to(slopes.dtype.element_ty), mask=inside)
    else:
        tl.store(losses + row, 0.0)
        if FP8:
            tl.store(scales + row, scale_of(0.0))
        for first in range(0, width, BLOCK):
            inside = first + columns < width
            tl.store(result + first + columns, tl.zeros([BLOCK], tl.float32).to(slopes.dtype.element_ty), mask=inside)


def triton_epilogue(logits: Tensor, teacher: Tensor, share: Tensor) -> Tensor:
    """As `distil.plain_epilogue(soft_cross_entropy_)`, for contiguous tensors on CUDA."""
    return calculated(logits, teacher, share, Rounded(logits, share))


def triton_fp8_epilogue(logits: Tensor, teacher: Tensor, share: Tensor) -> tuple[Tensor, Rounded]:
    """The same, with gradients [M, D] rounded as `fp8_products` want them; `logits` stay."""
    slopes = Rounded(torch.empty_like(logits, dtype=E4M3), share.new_empty(len(share), 1))
    return calculated(logits, teacher, share, slopes), slopes


def calculated(logits: Tensor, teacher: Tensor, share: Tensor, slopes: Rounded) -> Tensor:
    """Losses f32[M] of `logits` [M, D] by `teacher` [C, D]; their gradients times `share` f32[M] go into `slopes`.

    Where these are numbers in 8 bits, so do the scales.
    """
    losses, teacher_lse = (torch.empty(len(rows), device=logits.device) for rows in (logits, teacher))
    width, count, taught = logits.shape[1], len(logits), len(teacher)
    if count:
        log_sum_exp[(taught,)](teacher, teacher_lse, width, BLOCK=BLOCK, num_warps=WARPS)
        tensors, sizes = (logits, teacher, teacher_lse, share, losses, *slopes), (taught, count // taught, width)
        soft_cross_entropy[(count,)](*tensors, *sizes, FP8=slopes.numbers.dtype == E4M3, BLOCK=BLOCK, num_warps=WARPS)
    return losses
