"""The rounding of `rounding.quantised` and `rounding.on_grid` in Triton: it reads each state once, and torch's operations ten times.

Shapes: N states of L layers, or F final ones, H hidden size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scripts.lib.states.rounding import FINENESS, LARGEST

WARPS = 4
MOST, STEPS = tl.constexpr(LARGEST), tl.constexpr(float(FINENESS))
WHOLE = tl.constexpr(3 * 2.0**22)  # a float32 that has it added keeps no fraction: rounded half to even, as torch does


@triton.jit
def magnitude(state):  # type: ignore[no-untyped-def]
    """The largest magnitude of the numbers of one state, NaN where one is: the maximum alone would pass over it."""
    odd = tl.max(tl.where(tl.abs(state) <= float("inf"), 0, 1), 0)
    return tl.where(odd > 0, float("nan"), tl.max(tl.abs(state), 0))


@triton.jit
def to_e4m3(states, bits, scales, peaks, size: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """One state: its e4m3 numbers, their scale and the largest magnitude."""
    number = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < size
    state = tl.load(states + number * size + place, mask=inside, other=0.0).to(tl.float32)
    peak = magnitude(state)
    scale = tl.div_rn(peak, MOST)
    values = tl.div_rn(state, tl.zeros([BLOCK], tl.float32) + scale).to(tl.float8e4nv)
    tl.store(bits + number * size + place, values.to(tl.uint8, bitcast=True), mask=inside)
    tl.store(scales + number, scale)
    tl.store(peaks + number, peak.to(tl.bfloat16))


@triton.jit
def to_grid(states, rounded, peaks, size: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One state: its numbers on its grid, and the largest magnitude."""
    number = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < size
    state = tl.load(states + number * size + place, mask=inside, other=0.0).to(tl.float32)
    step = tl.div_rn(tl.sqrt_rn(tl.div_rn(tl.sum(state * state, 0), size * 1.0)), STEPS)
    multiples = tl.div_rn(state, tl.zeros([BLOCK], tl.float32) + step) + WHOLE - WHOLE
    multiples = tl.where(step == 0, 0.0, multiples)  # of nothing but noughts
    tl.store(rounded + number * size + place, (multiples * step).to(tl.bfloat16), mask=inside)
    tl.store(peaks + number, magnitude(state).to(tl.bfloat16))


def e4m3_states(aux: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bits u8 [N, L, H] of e4m3 numbers, scales f32 [N, L] and largest magnitudes bf16 [N, L] of contiguous `aux` bf16 [N, L, H]."""
    bits, scales = torch.empty_like(aux, dtype=torch.uint8), aux.new_empty(aux.shape[:2], dtype=torch.float32)
    peaks = aux.new_empty(aux.shape[:2])
    launch(to_e4m3, aux, bits, scales, peaks)
    return bits, scales, peaks


def grid_states(final: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous `final` bf16 [F, H] on its grids, and largest magnitudes bf16 [F]."""
    rounded, peaks = torch.empty_like(final), final.new_empty(len(final))
    launch(to_grid, final, rounded, peaks)
    return rounded, peaks


def launch(kernel: Any, states: Tensor, *results: Tensor) -> None:
    """Run `kernel`, a program for each of `states` [..., H], on the device where they lie."""
    size = states.shape[-1]
    if states.numel():
        with torch.cuda.device_of(states):
            kernel[(states.numel() // size,)](states, *results, size, triton.next_power_of_2(size), num_warps=WARPS)
