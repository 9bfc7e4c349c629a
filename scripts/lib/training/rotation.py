"""Rotary embedding at the positions of a batch, whose angles are computed once.

Shapes: N positions of a batch, T rows of heads, n heads, E head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scripts.lib.eagle3.model import Rotary


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines f32[N, 1, E / 2] of the angles at each position."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, rotary: Rotary, positions: Tensor) -> "Rotation":
        """Those of `rotary` at `positions` i64[N]."""
        angles = (positions[:, None].float() * rotary.frequencies.to(positions.device))[:, None]
        return cls(angles.cos() * rotary.scaling, angles.sin() * rotary.scaling)

    def heads(self, states: Tensor) -> Tensor:
        """[T, n, E] from [T, n E]."""
        return states.unflatten(-1, (-1, 2 * self.cos.shape[-1]))

    def turned(self, states: Tensor, places: Tensor | None = None) -> Tensor:
        """Heads [T, n, E] of `states` [T, n E], turned at `places` i64[T] of the batch; without places at all of them."""
        cos, sin = (self.cos, self.sin) if places is None else (self.cos[places], self.sin[places])
        return Turn.apply(self.heads(states), cos.to(states.dtype), sin.to(states.dtype))


class Turn(torch.autograd.Function):
    """Dimension i of a head turns with i + E / 2."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, n, E] of `heads` [T, n, E]."""
        ctx.save_for_backward(cos, sin)
        return turn(heads, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Turned back."""
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, sin, -1), None, None


def turn(heads: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """`heads` [T, n, E], turned forwards (1) or back (-1)."""
    first, second = heads.chunk(2, -1)
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    for out, along, across, direction in zip(turned.chunk(2, -1), (first, second), (second, first), (-sign, sign), strict=True):
        torch.mul(along, cos, out=out).addcmul_(across, sin, value=direction)
    return turned
