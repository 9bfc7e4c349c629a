"""What `fp8_numbers` leaves to Triton: turning a matrix tile by tile, and gating rows that are rounded where they are made.

What is no number does not count for a row's scale, and stays what it is when it becomes 8 bits; what is infinite becomes no number.
Shapes: M rows, K numbers of a row, I width of a gated MLP.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from scripts.lib.training.fp8_numbers import E4M3, LARGEST_EXPONENT, TINY

TILE, TILE_WARPS = 128, 8  # of a turned matrix, in both directions
LARGEST, BY_WARP = 8192, 512  # numbers of a row that are gated at a time, and those of a warp
SMALLEST, UNIT = tl.constexpr(TINY), tl.constexpr(2.0**-LARGEST_EXPONENT)


@triton.jit
def scale_of(largest):  # type: ignore[no-untyped-def]
    """As `fp8_numbers.scale_of`."""
    bits = tl.maximum(largest, SMALLEST).to(tl.float32).to(tl.int32, bitcast=True)
    return ((bits + 0x1FFFFF) & 0x7F800000).to(tl.float32, bitcast=True) * UNIT


@triton.jit
def turn(numbers, share, result, count, width: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """One tile of `numbers` [count, width] into `result` [width, count]."""
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    tile = tl.load(numbers + rows[:, None] * width + columns[None, :], mask=inside)
    if SHARED:
        tile = (tile.to(tl.float32) * tl.load(share + rows, mask=rows < count)[:, None]).to(result.dtype.element_ty)
    tl.store(result + columns[:, None] * count + rows[None, :], tl.trans(tile), mask=tl.trans(inside))


@triton.jit
def gate_row(gate_up, numbers, scales, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row, read twice: for the largest number, and for all of them. The second time it is still in the caches."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        largest = tl.maximum(largest, tl.abs(gated_part(gate_up + row * 2 * width, first + places, width)))
    scale = scale_of(tl.max(largest, 0))
    tl.store(scales + row, scale)
    for first in range(0, width, BLOCK):
        found = gated_part(gate_up + row * 2 * width, first + places, width) * (1 / scale)
        tl.store(numbers + row * width + first + places, found.to(numbers.dtype.element_ty), mask=first + places < width)


@triton.jit
def gated_part(gate_up, places, width):  # type: ignore[no-untyped-def]
    """silu(gate) * up at `places` of a row; nought outside of it."""
    gate = tl.load(gate_up + places, mask=places < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + places, mask=places < width, other=0.0).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def gate_row_back(grad, gate_up, numbers, scales, width: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    """One row, read twice as in `gate_row`."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        to_gate, to_up = slopes_part(grad + row * width, gate_up + row * 2 * width, first + places, width)
        largest = tl.maximum(largest, tl.maximum(tl.abs(to_gate), tl.abs(to_up)))
    scale = scale_of(tl.max(largest, 0))
    tl.store(scales + row, scale)
    result = numbers + row * 2 * width
    for first in range(0, width, BLOCK):
        to_gate, to_up = slopes_part(grad + row * width, gate_up + row * 2 * width, first + places, width)
        inside = first + places < width
        tl.store(result + first + places, (to_gate * (1 / scale)).to(numbers.dtype.element_ty), mask=inside)
        tl.store(result + width + first + places, (to_up * (1 / scale)).to(numbers.dtype.element_ty), mask=inside)


@triton.jit
def slopes_part(grad, gate_up, places, width):  # type: ignore[no-untyped-def]
    """Gradients of gate and of up at `places` of a row; nought outside of it."""
    back = tl.load(grad + places, mask=places < width, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + places, mask=places < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + places, mask=places < width, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate)
    return back * up * opened * (1 + gate * (1 - opened)), back * gate * opened


def turned(numbers: Tensor, share: Tensor | None) -> Tensor:
    """As `fp8_numbers.turned`, of contiguous numbers on CUDA."""
    count, width = numbers.shape
    result = numbers.new_empty(width, count)
    tiles = (triton.cdiv(count, TILE), triton.cdiv(width, TILE))
    # What is only moved, goes as bytes.
    moved = (numbers, share, result) if share is not None else (numbers.view(torch.uint8), numbers, result.view(torch.uint8))
    turn[tiles](*moved, count, width, SHARED=share is not None, TILE=TILE, num_warps=TILE_WARPS)
    return result


def gated(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """As `fp8_numbers.gated`, of contiguous rows on CUDA."""
    count, width = len(gate_up), gate_up.shape[1] // 2
    numbers, scale = gate_up.new_empty(count, width, dtype=E4M3), gate_up.new_empty(count, 1, dtype=torch.float32)
    gate_row[(count,)](gate_up, numbers, scale, width, **block(width))
    return numbers, scale


def gated_back(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """As `fp8_numbers.gated_back`, of contiguous rows on CUDA."""
    count, width = grad.shape
    numbers, scale = gate_up.new_empty(gate_up.shape, dtype=E4M3), gate_up.new_empty(count, 1, dtype=torch.float32)
    gate_row_back[(count,)](grad, gate_up, numbers, scale, width, **block(width))
    return numbers, scale


def block(width: int) -> dict[str, int]:
    """How a row of `width` is gated: so many numbers at a time by so many warps."""
    size = min(triton.next_power_of_2(width), LARGEST)
    return {"BLOCK": size, "num_warps": max(size // BY_WARP, 1)}
