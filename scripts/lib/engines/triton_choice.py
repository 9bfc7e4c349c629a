"""The best token of rows of logits in Triton: torch's reduction takes as long as half of the product that gave them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


@triton.jit
def first_best(logits, result, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of one row the first of its best tokens: each column of blocks keeps its own, and one reduction ends them all."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    places = columns
    for first in range(0, width, BLOCK):
        scores = tl.load(logits + row * width + first + columns, mask=first + columns < width, other=-float("inf")).to(tl.float32)
        better = scores > best
        best = tl.where(better, scores, best)
        places = tl.where(better, first + columns, places)
    chosen = tl.min(tl.where(best == tl.max(best, 0), places, width - 1), 0)
    tl.store(result + row, chosen.to(tl.int64))


def first_choices(logits: Tensor) -> Tensor:
    """`logits.argmax(-1)` [F] of contiguous `logits` [F, V] on a GPU. A row with a number that is none gets some token."""
    result = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        with torch.cuda.device_of(logits):
            first_best[(len(logits),)](logits, result, logits.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return result
