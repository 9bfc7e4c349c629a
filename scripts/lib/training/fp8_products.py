"""Matrix products of numbers in 8 bits (e4m3), of which newer GPUs do twice as many a second as in bfloat16.

All three products of a weight are made so: outputs, gradients of inputs, and gradients of weights. Numbers that are summed up share
a scale, which each row has for itself; as scales are powers of two, a number that is given another one keeps its bits while it is in
the range. So a row is rounded once: for the gradient of a weight, whose sum runs over rows, what was made is only shifted to one scale.
The head's inputs that matter most are there in two pieces (`Refined`). What all of it costs a drafter is in docs/measurements.md.
Scales finer than a tensor's: DeepSeek-V3 (arXiv 2412.19437, section 3.3) and torchao's recipe `rowwise`; powers of two as in the
microscaling formats of the Open Compute Project.
Shapes: M rows, I inputs and O outputs of a weight [O, I], D draft vocabulary, H hidden size, R inputs in two pieces.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.lib.eagle3.model import DrafterConfig
from scripts.lib.ground.errors import StageError
from scripts.lib.training.distil import Epilogue

E4M3 = torch.float8_e4m3fn
LARGEST_EXPONENT = 8  # e4m3 ends at 448, which is 1.75 times two to the power of this
TINY = 2.0**-50  # no scale is finer than that of such a row: the product of two must not be nought
KEPT = 64  # inputs of the head in two pieces
MULTIPLE = 16  # of all sizes of a product, which hardware asks for
CAPABILITY = (8, 9)  # of the first GPUs that have these products


class Rounded(NamedTuple):
    """Rows [M, K] as `numbers` in e4m3 [M, K] times `scale` f32[M, 1]."""

    numbers: Tensor
    scale: Tensor


class Fp8Weight(NamedTuple):
    """A `weight` [O, I] that takes gradients, and how products take it: by `rows` [O, I] and, for gradients, by `columns` [I, O]."""

    weight: Tensor
    rows: Rounded
    columns: Rounded


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


def fp8_weight(weight: Tensor) -> Fp8Weight:
    """`weight` [O, I] for products; good until it moves."""
    fixed = weight.detach()
    return Fp8Weight(weight, rounded(fixed), rounded(fixed.t().contiguous()))


def scaled(left: Rounded, right: Rounded, dtype: torch.dtype) -> Tensor:
    """`left` [M, K] times the transpose of `right` [N, K], [M, N]."""
    return torch._scaled_mm(left.numbers, right.numbers.t(), left.scale, right.scale.t(), out_dtype=dtype)


def weight_gradient(grad: Rounded, inputs: Rounded, dtype: torch.dtype) -> Tensor:
    """`grad`.T [O, M] times `inputs` [M, I], [O, I]. Rows whose part is under 2^-10 of the largest one's begin to lose bits."""
    factor = grad.scale * inputs.scale
    largest = factor.amax()
    shifted = (inputs.numbers.float() * (factor / largest)).to(E4M3)
    return torch._scaled_mm(grad.numbers.t().contiguous(), shifted.t().contiguous().t(), largest, torch.ones_like(largest), out_dtype=dtype)


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


# Losses f32[M] as of a `distil.Epilogue`, and the gradients of logits, rounded.
Fp8Epilogue = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Rounded]]


class Refined(NamedTuple):
    """A head [D, H] as its products take it: `rows` [D, H + 2R] for logits, `columns` [H, D] for gradients of states.

    Logits are differences of large sums, to which a few inputs give most; those that give most, `kept` i64[R], are there in two pieces, so
    that they have 8 bits where others have 4.
    """

    rows: Rounded
    columns: Rounded
    kept: Tensor


class HeadKernels(NamedTuple):
    """The functions of these names, plain or compiled; `logits` and `gradients` are the head's."""

    refined: Callable[[Tensor, Tensor], Refined]
    logits: Callable[[Tensor, Rounded, Tensor], Tensor]
    gradients: Callable[[Rounded, Tensor, Rounded, Tensor], Tensor]
    rounded: Callable[[Tensor], Rounded]


class Fp8Head:
    """As `distil.PlainHead`, its `weight` [D, H] refined for `states` [Q, H] and others like them."""

    def __init__(self, kernels: HeadKernels, epilogue: Fp8Epilogue, weight: Tensor, states: Tensor) -> None:
        self.kernels, self.epilogue, self.refined = kernels, epilogue, kernels.refined(weight, states)
        self.gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def learn(self, states: Tensor, teacher: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """As `distil.Head` says."""
        logits = self.kernels.logits(states, self.refined.rows, self.refined.kept)
        losses, slopes = self.epilogue(logits, teacher, share)
        return losses, self.kernels.gradients(slopes, states, self.refined.columns, self.gradient)


def rounding(epilogue: Epilogue, kernels: HeadKernels) -> Fp8Epilogue:
    """`epilogue`, and its gradients rounded."""

    def judged(logits: Tensor, teacher: Tensor, share: Tensor) -> tuple[Tensor, Rounded]:
        return epilogue(logits, teacher, share), kernels.rounded(logits)

    return judged


def refined(weight: Tensor, states: Tensor) -> Refined:
    """The head `weight` [D, H] for `states` [Q, H], which say what inputs give most."""
    given = states.float().square().mean(0) * weight.float().square().mean(0)
    kept = given.topk(min(KEPT, len(given))).indices
    rows, high, low = pieces(weight, kept)
    return Refined(joined(rows, high, low), rounded(weight.t().contiguous()), kept)


def head_logits(states: Tensor, rows: Rounded, kept: Tensor) -> Tensor:
    """[M, D] of `states` [M, H] and the `rows` [D, H + 2R] of a head that has some inputs in two pieces, `kept` i64[R]."""
    made, high, low = pieces(states, kept)
    return scaled(joined(made, low, high), rows, states.dtype)


def pieces(rows: Tensor, kept: Tensor) -> tuple[Rounded, Tensor, Tensor]:
    """`rows` [M, K] rounded; of those `kept` i64[R] of K, what they have become, and what that leaves: e4m3 [M, R]."""
    made = rounded(rows)
    high = made.numbers.view(torch.uint8).index_select(1, kept).view(E4M3)
    low = (rows.index_select(1, kept) * made.scale.reciprocal() - high.float()).to(E4M3)
    return made, high, low


def joined(rows: Rounded, *more: Tensor) -> Rounded:
    """`rows` [M, K], and `more` numbers [M, R] of the same scale behind them."""
    parts = [part.view(torch.uint8) for part in (rows.numbers, *more)]
    return Rounded(torch.cat(parts, 1).view(E4M3), rows.scale)


def head_gradients(slopes: Rounded, states: Tensor, columns: Rounded, total: Tensor) -> Tensor:
    """The gradient [M, H] of `states` [M, H] for `slopes` [M, D] of their logits; the head's is added to `total` f32[D, H]."""
    total += weight_gradient(slopes, rounded(states), torch.float32)
    return scaled(slopes, columns, states.dtype)


HEAD = HeadKernels(refined, head_logits, head_gradients, rounded)


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
