"""States in fewer bits: e4m3 with scales for what a drafter reads, a grid of its own for each state that teaches.

Shapes: N states of a shard (tokens, or final states), L layers, H hidden size.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SERIAL = 2**15 - 1  # numbers at a time: torch takes further threads for more, and rows are decoded in several threads already
HALF_BITS = -0x4080  # of an e4m3 whose sign was extended: bit 14 goes
FINENESS = 72  # steps of a grid: the teacher's error is then about that of a bfloat16 with one bit less (docs/measurements.md)


def quantised(states: Tensor) -> tuple[Tensor, Tensor]:
    """`states` bf16 [N, L, H] as e4m3 [N, L, H] and scales f32 [N, L].

    A scale per token and layer: the first tokens of a text are orders of magnitude larger than all others.
    """
    scales = divided(states.abs().amax(-1).float(), LARGEST)
    return (states.float() / scales[..., None]).to(FP8), scales


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """bf16 [N, L, H] of e4m3 `values` [N, L, H] and `scales` f32 [N, L].

    The bits of an e4m3, moved to their places in a float16, are that of 2^-8 times its value: several times quicker than torch's
    conversion, a number at a time. The product is the same to the last bit, as powers of two are exact. numpy stays in the calling thread
    whatever the size.
    """
    halves = np.left_shift(values.view(torch.int8).numpy(), 7, dtype=np.int16)
    halves &= HALF_BITS
    numbers, factors = torch.from_numpy(halves).view(torch.float16), scales[..., None] * 2**8
    result = torch.empty(values.shape, dtype=torch.bfloat16)
    for some, factor, place in blocks(numbers, factors, result):
        place.copy_(some.float().mul_(factor))
    return result


def on_grid(states: Tensor, fineness: int = FINENESS) -> tuple[Tensor, Tensor]:
    """The multiples i16 [N, H] and steps f32 [N] of the grids, one a state, that `states` bf16 [N, H] are rounded to.

    A logit adds up the errors of all H numbers, so that an even error costs a teacher less than one that grows with the number, as that
    of floating point does: it is the even one that takes the fewest bits. There are `fineness` steps to the root mean square of a state.
    """
    wide = states.float()
    steps = divided(wide.square().mean(-1).sqrt(), fineness)
    return (wide / steps[:, None]).round().to(torch.int16), steps


def off_grid(multiples: Tensor, steps: Tensor) -> Tensor:
    """bf16 [N, H] of `multiples` i16 [N, H] of the `steps` f32 [N]."""
    result = torch.empty(multiples.shape, dtype=torch.bfloat16)
    for some, step, place in blocks(multiples, steps[:, None], result):
        place.copy_(some.float().mul_(step))
    return result


def divided(numbers: Tensor, divisor: float) -> Tensor:
    """`numbers` over `divisor`, the same to the last bit on any device: by a Python number a GPU would multiply with the reciprocal."""
    return numbers / torch.full((), divisor, dtype=numbers.dtype, device=numbers.device)


def blocks(*tensors: Tensor, numbers: int = SERIAL) -> Iterator[tuple[Tensor, ...]]:
    """The same stretches of all `tensors`, of at most so many `numbers` of the first, or one state.

    So few as are meant without another word torch converts in the calling thread alone, and they stay in the cache.
    """
    first = tensors[0]
    size = max(numbers * len(first) // max(first.numel(), 1), 1)
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)
