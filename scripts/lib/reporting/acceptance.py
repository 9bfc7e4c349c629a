"""From counts of accepted drafts to acceptance by position, and to the accept length of shorter chains."""

import math
from collections.abc import Sequence
from itertools import pairwise

from scripts.lib.reporting.estimate import Z95, Estimate


def survivors(histogram: Sequence[int]) -> list[int]:
    """Cycles in which at least j drafts were accepted, by j from 0; entry i of `histogram` counts cycles with exactly i."""
    return [sum(histogram[place:]) for place in range(len(histogram))]


def by_position(histogram: Sequence[int]) -> list[Estimate | None]:
    """The share of drafts at positions 1, 2, … that are accepted where all before them were; None where none came so far.

    The 95 % interval is Wilson's, its half width here; cycles count as independent.
    """
    reached = survivors(histogram)
    return [share(after, before) for before, after in pairwise(reached)]


def share(part: int, whole: int) -> Estimate | None:
    """A share with the half width of its Wilson interval."""
    if whole == 0:
        return None
    rate = part / whole
    return Estimate(rate, Z95 * math.sqrt(rate * (1 - rate) / whole + Z95**2 / (4 * whole**2)) / (1 + Z95**2 / whole))


def shortened(histogram: Sequence[int], steps: int) -> Estimate | None:
    """The accept length of a chain of `steps` drafts, had the measured chain stopped there; None beyond the measured positions.

    It is 1 + Σ over j of the share of cycles with at least j accepted drafts. The cycles of a shorter chain would begin at other
    places, more of them within stretches that are easy to guess, so that this is rather too low.
    """
    cycles = sum(histogram)
    if not 1 <= steps < len(histogram) or cycles < 2:
        return None
    accepted = [min(drafts, steps) for drafts in range(len(histogram))]
    mean = sum(count * drafts for count, drafts in zip(histogram, accepted, strict=True)) / cycles
    variance = sum(count * (drafts - mean) ** 2 for count, drafts in zip(histogram, accepted, strict=True)) / (cycles - 1)
    return Estimate(1 + mean, Z95 * math.sqrt(variance / cycles))
