"""Matrix products of training rows with the drafter's weights on a CPU, where copies cost as much as arithmetic.

A product's gradient goes straight to the weight's own, with no tensor in between that would be added up later.
Shapes: M rows, I inputs and O outputs of a weight [O, I], H hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from scripts.lib.eagle3.model import Drafter

ALL = slice(None)


class Operands:
    """The weights of `drafter` as products in `dtype` take them, cast once; good until an optimizer step moves them."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype) -> None:
        self.drafter, self.dtype = drafter, dtype
        self.cast: dict[Tensor, Tensor] = {}

    def of(self, weight: Tensor) -> Tensor:
        """`weight` in `dtype`, without a gradient."""
        if weight not in self.cast:
            self.cast[weight] = weight.detach().to(self.dtype)
        return self.cast[weight]

    def product(self, inputs: Tensor, weight: Tensor, columns: slice = ALL) -> Tensor:
        """`inputs` [M, I] times the `columns` I of `weight`, [M, O] in `dtype`."""
        return Product.apply(inputs, weight, self.of(weight), columns)

    def constant_product(self, inputs: Tensor, scale: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """`inputs` [M, I] that need no gradient, times `scale` [I], times the `columns` I of `weight`: [M, O] in `dtype`."""
        return ConstantProduct.apply(inputs.to(self.dtype), scale, weight, columns)

    def norm(self, states: Tensor, norm: nn.RMSNorm) -> Tensor:
        """`states` [M, H] behind `norm`."""
        return Norm.apply(states, norm.weight, norm.eps)


class Product(torch.autograd.Function):
    """`inputs` @ `weight`.T of some columns."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, operand: Tensor, columns: slice) -> Tensor:
        """[M, O] from [M, I]; `operand` is `weight` in the dtype of the product."""
        ctx.weight, ctx.columns, ctx.dtype = weight, columns, inputs.dtype
        rows, operand = inputs.to(operand.dtype), operand[:, columns]
        ctx.save_for_backward(rows, operand)
        return rows @ operand.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """To the inputs; the weight's is added up in place."""
        rows, operand = ctx.saved_tensors
        add_product(gradient(ctx.weight)[:, ctx.columns], grad, rows)
        return (grad @ operand).to(ctx.dtype) if ctx.needs_input_grad[0] else None, None, None, None


class ConstantProduct(torch.autograd.Function):
    """(`inputs` * `scale`) @ `weight`.T of some columns, for inputs without a gradient.

    With G = grad.T @ `inputs`, the weight's gradient is G * `scale`, and that of `scale` the sum of G * `weight`:
    the gradient of the scaled inputs, a product as large as the other two, is not needed.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """[M, O] in the dtype of `inputs` [M, I]."""
        ctx.scale, ctx.weight, ctx.columns = scale, weight, columns
        ctx.save_for_backward(inputs)
        return inputs @ (weight.detach()[:, columns] * scale.detach()).to(inputs.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        """Adds up in place."""
        (inputs,) = ctx.saved_tensors
        product = (grad.T @ inputs).float()
        gradient(ctx.weight)[:, ctx.columns].addcmul_(product, ctx.scale.detach())
        gradient(ctx.scale).add_((product * ctx.weight.detach()[:, ctx.columns]).sum(0))
        return None, None, None, None


class Norm(torch.autograd.Function):
    """Root-mean-square norm, in a few passes over the rows."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        """f32[M, H] from [M, H]."""
        ctx.weight, ctx.dtype, states = weight, states.dtype, states.float()
        inverse = torch.linalg.vector_norm(states, dim=-1).square_().div_(states.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(states, inverse)
        return (states * inverse[:, None]).mul_(weight.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """To the states; the weight's is added up in place."""
        states, inverse = ctx.saved_tensors
        weight, products = ctx.weight.detach(), grad * states
        gradient(ctx.weight).addmv_(products.T, inverse)
        along = (products @ weight).mul_(inverse.pow(3).div_(states.shape[-1]))
        back = (grad * weight).mul_(inverse[:, None]).addcmul_(states, along[:, None], value=-1)
        return back.to(ctx.dtype), None, None


def gradient(weight: Tensor) -> Tensor:
    """Where the gradient of `weight` adds up; zeros at first."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left`.T @ `right` ([M, O] and [M, I]) to `total` f32[O, I]."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right
