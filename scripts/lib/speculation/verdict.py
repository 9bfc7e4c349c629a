"""Whether two answers to one prompt are the same, and how near to a tie two tokens are where they part."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

FLOAT32_NOISE = 1e-3
NOISE_ULPS = 4
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclass(frozen=True)
class Verdict:
    """How an answer compares with the target's own.

    `first_difference` is the first index where they differ. `gap` is how far, in logits of the target alone there, the
    other token lies below the best one, and `noise` the limit for a near tie; None where the answers are equal, `gap` also where
    one of them has no token there. A later turn is `uncompared` when the turns before it differ: it was asked something else.
    """

    kind: Literal["identical", "near_tie", "different", "uncompared"]
    first_difference: int | None = None
    gap: float | None = None
    noise: float | None = None


def judged(index: int, gap: float, limit: float) -> Verdict:
    """The verdict on answers that part at `index` by `gap`."""
    return Verdict("near_tie" if gap <= limit else "different", index, gap, limit)


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index where the two sequences differ or one of them has ended; None when they are equal."""
    return next((index for index, (a, b) in enumerate(zip_longest(plain, other)) if a != b), None)


def noise(dtype: str, logit: float) -> float:
    """The largest gap of two logits near `logit` that another order of the same sums can turn around, in the dtype of this name.

    One token and several take other matrix kernels, which add in another order. Forward passes of 1 and of 5 tokens over the same
    100 tokens of SmolLM2-135M, logits 5 to 41, moved the gap of the two best logits by up to 3e-5 in float32, and in bfloat16 by
    up to 3 units in the last place (ulp) of the logit, 0.6 in all. The limits, 1e-3 and 4 ulp, leave room for deeper targets; an
    error of the loop shows as a gap of whole logits.
    """
    if dtype == "float32":
        return FLOAT32_NOISE
    return NOISE_ULPS * EPS[dtype] * 2.0 ** math.floor(math.log2(max(abs(logit), 1.0)))
