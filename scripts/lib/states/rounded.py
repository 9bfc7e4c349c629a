"""States in fp8 without compression, rounded where they were computed: what takes a host longer than a pass takes a GPU next to nothing.

An e4m3 and its scale are the same to the last bit wherever they are made. The step of a grid is a mean, which devices add up in other
orders: it may differ in its last bit from that of a CPU, and then a number of a final state here and there is rounded to the next one.

Shapes: T tokens and F positions with a teacher of one row or several, H hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.lib.states.checks import largest
from scripts.lib.states.encoded import Factored
from scripts.lib.states.rounding import blocks, on_grid, quantised
from scripts.lib.states.storing import Storing

ROUNDED = Storing("fp8")
AT_ONCE = 2**26  # numbers: bounds what rounding takes of a GPU's memory, in float32 and twice
ROUNDS_ONCE = (9, 0)  # compute capability from which Triton makes an e4m3 of a float32; before, it makes a float16 first, or nothing at all


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


def rounded_aux(aux: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bits u8 [T, 3, H] of e4m3 numbers, which few operations take, scales f32 [T, 3] and peaks [T, 3] of `aux` bf16 [T, 3, H]."""
    if aux.is_cuda and torch.cuda.get_device_capability(aux.device) >= ROUNDS_ONCE:
        from scripts.lib.states.triton_rounding import e4m3_states  # Triton is there with CUDA only

        return e4m3_states(aux)
    bits = torch.empty(aux.shape, dtype=torch.uint8, device=aux.device)
    scales = torch.empty(aux.shape[:2], dtype=torch.float32, device=aux.device)
    for some, *places in blocks(aux, bits, scales, numbers=AT_ONCE):
        values, factors = quantised(some)
        for place, made in zip(places, (values.view(torch.uint8), factors), strict=True):
            place.copy_(made)
    return bits, scales, largest(aux)


def rounded_final(final: Tensor) -> tuple[Tensor, Tensor]:
    """`final` bf16 [F, H] on its grid, and the peaks [F] of what it was."""
    if final.is_cuda:
        from scripts.lib.states.triton_rounding import grid_states

        return grid_states(final)
    return Factored(*on_grid(final)).product(), largest(final)
