"""Does speculation change the answer? It may only where the target itself cannot tell two tokens apart.

Shapes: H hidden size, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
from torch import nn

from scripts.lib.speculation.decoding import PlainRun

FLOAT32_NOISE = 1e-3
NOISE_ULPS = 4


@dataclass(frozen=True)
class Verdict:
    """How an answer compares with the target's own.

    `first_difference` is the first index where they differ. `gap` is how far, in logits of the plain run there, the
    other token lies below the best one, and `noise` the limit for a near tie; None where the answers are equal, `gap` also where
    one of them has no token there.
    """

    kind: Literal["identical", "near_tie", "different"]
    first_difference: int | None = None
    gap: float | None = None
    noise: float | None = None


@torch.inference_mode()
def compare(plain: PlainRun, other_ids: Sequence[int], head: nn.Module) -> Verdict:
    """Judge `other_ids` by the plain run; `head` maps its states [H] to logits [V], in the shape that chose its tokens."""
    index = first_difference(plain.output_ids, other_ids)
    if index is None:
        return Verdict("identical")
    if index >= min(len(plain.output_ids), len(other_ids)):
        return Verdict("different", index)
    logits = head(plain.states[index][None])[0]
    best = logits[plain.output_ids[index]].item()
    gap = best - logits[other_ids[index]].item()
    limit = noise(logits.dtype, best)
    return Verdict("near_tie" if gap <= limit else "different", index, gap, limit)


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index where the two sequences differ or one of them has ended; None when they are equal."""
    return next((index for index, (a, b) in enumerate(zip_longest(plain, other)) if a != b), None)


def noise(dtype: torch.dtype, logit: float) -> float:
    """The largest gap of two logits near `logit` that another order of the same sums can turn around.

    One token and several take other matrix kernels, which add in another order. Forward passes of 1 and of 5 tokens over the same
    100 tokens of SmolLM2-135M, logits 5 to 41, moved the gap of the two best logits by up to 3e-5 in float32, and in bfloat16 by
    up to 3 units in the last place (ulp) of the logit, 0.6 in all. The limits, 1e-3 and 4 ulp, leave room for deeper targets; an
    error of the loop shows as a gap of whole logits.
    """
    if dtype == torch.float32:
        return FLOAT32_NOISE
    return NOISE_ULPS * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(logit), 1.0)))
