"""Rows of numbers in 8 bits (e4m3), each with a scale of its own, and what is done to them at a stretch.

As scales are powers of two, a number that is given another one keeps its bits while it is in the range.
`turned`, `gated` and `gated_back` are operations of their own, which torch.compile leaves as they are: it would write the columns of
a turned matrix while it goes through rows, one byte here and one there, and read a gated row from memory twice.
Scales finer than a tensor's: DeepSeek-V3 (arXiv 2412.19437, section 3.3) and torchao's recipe `rowwise`; powers of two as in the
microscaling formats of the Open Compute Project.
Shapes: M rows, K numbers of a row, I width of a gated MLP.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

E4M3 = torch.float8_e4m3fn
LARGEST_EXPONENT = 8  # e4m3 ends at 448, which is 1.75 times two to the power of this
MULTIPLE = 16  # of all sizes of a product, which hardware asks for
TINY = 2.0**-50  # no scale is finer than that of such a row: the product of two must not be nought


class Rounded(NamedTuple):
    """Rows [M, K] as `numbers` in e4m3 [M, K] times `scale` f32[M, 1]."""

    numbers: Tensor
    scale: Tensor


def scale_of(largest: Tensor) -> Tensor:
    """The smallest power of two by which numbers up to `largest` f32 have to be divided to lie in the range of e4m3."""
    bits = largest.clamp(min=TINY).view(torch.int32)
    # Its exponent, and one more where its fraction is over 1.75.
    return (bits + 0x1FFFFF & 0x7F800000).view(torch.float32) * 2.0**-LARGEST_EXPONENT


def rounded(rows: Tensor) -> Rounded:
    """`rows` [M, K], each with a scale of its own."""
    rows = rows.contiguous()
    scale = scale_of(rows.abs().amax(-1, keepdim=True).float())
    return Rounded((rows * scale.reciprocal()).to(E4M3), scale)


@torch.library.custom_op("aerie::turned", mutates_args=())
def turned(numbers: Tensor, share: Tensor | None = None) -> Tensor:
    """[K, M] of `numbers` e4m3 [M, K]; each row times its `share` f32[M, 1], a power of two up to one."""
    if numbers.is_cuda:
        from scripts.lib.training import triton_fp8  # Triton is there with CUDA only

        return triton_fp8.turned(numbers, share)
    return (numbers if share is None else (numbers.float() * share).to(E4M3)).t().clone(memory_format=torch.contiguous_format)


@turned.register_fake
def _(numbers: Tensor, share: Tensor | None = None) -> Tensor:
    return numbers.new_empty(numbers.shape[::-1])


@torch.library.custom_op("aerie::gated", mutates_args=())
def gated(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of `gate_up` [M, 2 I], rounded: numbers e4m3 [M, I] and scale f32[M, 1]."""
    if gate_up.is_cuda:
        from scripts.lib.training import triton_fp8

        return triton_fp8.gated(gate_up)
    gate, up = gate_up.float().chunk(2, -1)
    return tuple(rounded(functional.silu(gate) * up))  # type: ignore[return-value]


@gated.register_fake
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    count, width = gate_up.shape
    return gate_up.new_empty(count, width // 2, dtype=E4M3), gate_up.new_empty(count, 1, dtype=torch.float32)


@torch.library.custom_op("aerie::gated_back", mutates_args=())
def gated_back(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `gate_up` [M, 2 I] for `grad` [M, I] of silu(gate) * up, rounded: numbers e4m3 [M, 2 I] and scale f32[M, 1]."""
    if grad.is_cuda:
        from scripts.lib.training import triton_fp8

        return triton_fp8.gated_back(grad, gate_up)
    gate, up = gate_up.float().chunk(2, -1)
    open_, grad = torch.sigmoid(gate), grad.float()
    to_gate = grad * up * open_ * (1 + gate * (1 - open_))
    return tuple(rounded(torch.cat([to_gate, grad * gate * open_], -1)))  # type: ignore[return-value]


@gated_back.register_fake
def _(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up, dtype=E4M3), gate_up.new_empty(len(gate_up), 1, dtype=torch.float32)
