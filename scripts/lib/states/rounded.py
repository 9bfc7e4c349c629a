"""States in fp8 without compression, rounded where they were computed: what takes a host longer than a pass takes a GPU next to nothing.

An e4m3 and its scale are the same to the last bit wherever they are made. The step of a grid is a mean, which devices add up in other
orders: it may differ in its last bit from that of a CPU, and then a number of a final state here and there is rounded to the next one.

Shapes: T tokens and F positions with a teacher of one row or several, H hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.lib.states.encoded import Factored
from scripts.lib.states.rounding import blocks, on_grid, quantised
from scripts.lib.states.storing import Storing

ROUNDED = Storing("fp8")
AT_ONCE = 2**26  # numbers: bounds what rounding takes of a GPU's memory, in float32 and twice


@dataclass(frozen=True)
class Rounded:
    """What a shard holds of the states of a row: `aux` e4m3 [T, 3, H], their `scales` f32 [T, 3], and `final` bf16 [F, H]."""

    aux: Tensor
    scales: Tensor
    final: Tensor


def rounding_device(engine: str, storing: Storing, device: str) -> torch.device | None:
    """Where states are rounded before they come to the host, None where the host does that: on a CPU, or if a server gave them."""
    there = engine == "transformers" and storing == ROUNDED and torch.device(device).type != "cpu"
    return torch.device(device) if there else None


def rounded_aux(aux: Tensor) -> tuple[Tensor, Tensor]:
    """The bits u8 [T, 3, H] of e4m3 numbers, which few operations take, and scales f32 [T, 3] of `aux` bf16 [T, 3, H], on its device."""
    bits = torch.empty(aux.shape, dtype=torch.uint8, device=aux.device)
    scales = torch.empty(aux.shape[:2], dtype=torch.float32, device=aux.device)
    for some, *places in blocks(aux, bits, scales, numbers=AT_ONCE):
        values, factors = quantised(some)
        for place, made in zip(places, (values.view(torch.uint8), factors), strict=True):
            place.copy_(made)
    return bits, scales


def rounded_final(final: Tensor) -> Tensor:
    """`final` bf16 [F, H] on its grid, on its device."""
    result = torch.empty_like(final)
    for some, place in blocks(final, result, numbers=AT_ONCE):
        place.copy_(Factored(*on_grid(some)).product())
    return result
