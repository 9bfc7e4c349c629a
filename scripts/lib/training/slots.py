"""Which positions of a row are trained.

Shapes: S trained slots of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def trained_slots(spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Slots trained at step 0 of a row with loss `spans` [start, end), and how many of the span are left at each: both i64[S].

    Slot t predicts token t + 2 from token t + 1: both must lie in one span, so it runs from start - 1 to end - 3.
    A span at the very start of a row has no slot before it.
    """
    ranges = [range(max(start - 1, 0), end - 2) for start, end in spans]
    slots = [slot for positions in ranges for slot in positions]
    remaining = [positions.stop - slot for positions in ranges for slot in positions]
    return torch.tensor(slots, dtype=torch.int64), torch.tensor(remaining, dtype=torch.int64)
