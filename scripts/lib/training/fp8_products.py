"""Matrix products of numbers in 8 bits (e4m3), of which newer GPUs do twice as many a second as in bfloat16.

All three products of a weight are made so: outputs, gradients of inputs, and gradients of weights. Numbers that are summed up share
a scale, which each row has for itself. A row is rounded once all the same: for the gradient of a weight, whose sum runs over rows, what was
made is only shifted to one scale, as scales are powers of two. What all of it costs a drafter is in docs/measurements.md.
Shapes: M rows, I inputs and O outputs of a weight [O, I]; of a gated MLP I is the width and H the size of states.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.lib.eagle3.model import DrafterConfig
from scripts.lib.ground.errors import StageError
from scripts.lib.training.fp8_numbers import MULTIPLE, Rounded, gated, gated_back, rounded, turned

CAPABILITY = (8, 9)  # of the first GPUs that have these products


class Fp8Weight(NamedTuple):
    """A `weight` [O, I] that takes gradients, and how products take it: by `rows` [O, I] and, for gradients, by `columns` [I, O]."""

    weight: Tensor
    rows: Rounded
    columns: Rounded


def fp8_weight(weight: Tensor) -> Fp8Weight:
    """`weight` [O, I] for products; good until it moves."""
    fixed = weight.detach()
    return Fp8Weight(weight, rounded(fixed), rounded(fixed.t().contiguous()))


def scaled(left: Rounded, right: Rounded, dtype: torch.dtype) -> Tensor:
    """`left` [M, K] times the transpose of `right` [N, K], [M, N].

    A GPU's sums are fast ones, of fewer bits: half a percent off where rounding the numbers has left some 4.
    """
    if left.numbers.is_cuda:
        return torch._scaled_mm(left.numbers, right.numbers.t(), left.scale, right.scale.t(), out_dtype=dtype, use_fast_accum=True)
    # torch 2.11 has no scales of rows on a CPU. As they are powers of two, they may come behind the product.
    one = left.scale.new_ones(())
    return (torch._scaled_mm(left.numbers, right.numbers.t(), one, one, out_dtype=dtype) * left.scale * right.scale.t()).to(dtype)


def weight_gradient(grad: Rounded, inputs: Rounded, dtype: torch.dtype) -> Tensor:
    """`grad`.T [O, M] times `inputs` [M, I], [O, I]. Rows whose part is under 2^-10 of the largest one's begin to lose bits."""
    factor = grad.scale * inputs.scale
    largest = factor.amax()
    left, right = turned(grad.numbers), turned(inputs.numbers, factor / largest)
    return torch._scaled_mm(left, right.t(), largest, torch.ones_like(largest), out_dtype=dtype)


class Fp8Product(torch.autograd.Function):
    """`inputs` @ `weight`.T."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, *operand: Tensor) -> Tensor:
        """[M, O] from [M, I]; `operand` are the rows and columns of an `Fp8Weight`, tensor by tensor."""
        made = rounded(inputs)
        ctx.save_for_backward(*made, *operand[2:])
        return scaled(made, Rounded(*operand[:2]), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """To the inputs and the weight."""
        saved = ctx.saved_tensors  # once: a draft step that is computed again gives them once
        inputs, columns, made = Rounded(*saved[:2]), Rounded(*saved[2:]), rounded(grad)
        return scaled(made, columns, grad.dtype), weight_gradient(made, inputs, grad.dtype), None, None, None, None


def fp8_product(inputs: Tensor, weight: Fp8Weight) -> Tensor:
    """`inputs` [M, I] times `weight` [O, I], [M, O] in the dtype of `inputs`."""
    return Fp8Product.apply(inputs, weight.weight, *weight.rows, *weight.columns)


class Fp8Mlp(torch.autograd.Function):
    """(silu(gate) * up) @ `down`.T, gate and up being halves of `inputs` @ `gate_up`.T.

    What is between the products is rounded where it is made, in both directions, and never is in memory otherwise.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, gate_up: Tensor, down: Tensor, *operands: Tensor) -> Tensor:
        """[M, H] from [M, H]; `operands` are rows and columns of both weights as `Fp8Weight`, tensor by tensor."""
        made = rounded(inputs)
        opened = scaled(made, Rounded(*operands[:2]), inputs.dtype)
        acted = Rounded(*gated(opened))
        ctx.save_for_backward(*made, opened, *acted, *operands[2:4], *operands[6:])
        return scaled(acted, Rounded(*operands[4:6]), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """To the inputs and both weights."""
        saved, made = ctx.saved_tensors, rounded(grad)
        (inputs, acted, gate_up, down), opened = (Rounded(*saved[at : at + 2]) for at in (0, 3, 5, 7)), saved[2]
        slopes = Rounded(*gated_back(scaled(made, down, grad.dtype), opened))
        to_weights = weight_gradient(slopes, inputs, grad.dtype), weight_gradient(made, acted, grad.dtype)
        return scaled(slopes, gate_up, grad.dtype), *to_weights, *[None] * 8


def fp8_mlp(inputs: Tensor, gate_up: Fp8Weight, down: Fp8Weight) -> Tensor:
    """What a gated MLP of the weights `gate_up` [2 I, H] and `down` [H, I] makes of `inputs` [M, H]: [M, H] in their dtype."""
    operands = (*gate_up.rows, *gate_up.columns, *down.rows, *down.columns)
    return Fp8Mlp.apply(inputs, gate_up.weight, down.weight, *operands)


def check_fp8(config: DrafterConfig, device: str) -> None:
    """StageError unless `device` multiplies numbers in 8 bits, and those of a drafter of `config`."""
    on_gpu = torch.device(device).type == "cuda"
    if not on_gpu or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise StageError(
            f"precision fp8: {torch.cuda.get_device_name(device) if on_gpu else device} has no products in 8 bits, which GPUs have "
            "from compute capability 8.9 on: set the drafter's `precision` to bfloat16 or float32"
        )
    heads = config.num_attention_heads, 2 * config.num_key_value_heads
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "draft_vocab_size": config.draft_vocab_size}
    sizes |= {"size of all query heads": heads[0] * config.head_dim, "size of all keys and values": heads[1] * config.head_dim}
    for name, size in sizes.items():
        if size % MULTIPLE:
            raise StageError(f"precision fp8: {name} is {size}, no multiple of {MULTIPLE}: set the drafter's `precision` to bfloat16")
