"""Which states are finite, from their bits: several times quicker than to decode them, and in the calling thread alone.

Shapes: n states, L layers (absent from final states), H hidden size.
"""

import numpy as np
import torch
from torch import Tensor

from scripts.lib.states.encoded import Factored
from scripts.lib.states.rounding import FP8, LARGEST

EXPONENT = 0x7F80  # of a bfloat16: all ones in NaN and infinity
NOT_A_NUMBER = 0x7F  # of an e4m3, which has no infinity
AT_ONCE = 2**18  # bytes that are looked at together: they stay in the cache


def finite(states: Factored) -> Tensor:
    """bool [n]: whether all numbers of a state are finite, and stay so when they are multiplied."""
    numbers, factors = states.numbers, states.factors
    good = torch.ones(len(numbers), dtype=torch.bool)
    if factors is not None:
        largest = factors.flatten(1) * LARGEST if numbers.dtype == FP8 else factors[:, None]
        good &= largest.to(torch.bfloat16).isfinite().all(1)
    if numbers.dtype.is_floating_point:
        kind, mask = (torch.uint8, NOT_A_NUMBER) if numbers.dtype == FP8 else (torch.uint16, EXPONENT)
        good &= ~marked(numbers.view(kind).numpy(), mask)
    return good


def marked(bits: np.ndarray, mask: int) -> Tensor:
    """bool [n]: whether a number of `bits` u8 or u16 [n, …] has all bits of `mask`."""
    result = np.zeros(len(bits), dtype=bool)
    step = max(AT_ONCE // max(bits[:1].nbytes, 1), 1)
    for start in range(0, len(bits), step):
        block = bits[start : start + step]
        result[start : start + step] = (block & bits.dtype.type(mask)).reshape(len(block), -1).max(1, initial=0) == mask
    return torch.from_numpy(result)
