"""The weights that a drafter starts from.

Shapes: H hidden size, D draft vocabulary.
"""

from pathlib import Path

import torch
from torch import Tensor

from scripts.lib.eagle3.export import twins
from scripts.lib.eagle3.foreign import engine_tensors
from scripts.lib.eagle3.model import Drafter
from scripts.lib.eagle3.target import NORM, TargetWeights
from scripts.lib.ground.errors import StageError

STANDARD_DEVIATION = 0.02
DOWN = ".mlp.down_proj.weight"


def initialise(drafter: Drafter, seed: int) -> None:
    """Random weights from `seed`: normal with the usual deviation, norms one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(drafter.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * STANDARD_DEVIATION)


def warm_start(drafter: Drafter, target: TargetWeights) -> list[str]:
    """Take over the target's head, last norm and last layers, as many as the drafter has, as far as names and shapes fit; the names taken.

    The target's layers read features only: `fc` and the embedding half of the projections keep their random start. Of a wider MLP they
    are the last part, and the rest writes nothing yet.
    """
    taken = {"lm_head.weight": target.head()[drafter.target_ids], "norm.weight": target[NORM], **layer_weights(drafter, target)}
    with torch.no_grad():
        parameters = dict(drafter.named_parameters())
        for name, tensor in taken.items():
            if name.endswith(DOWN):
                parameters[name].zero_()
            last = tuple(slice(whole - part, whole) for whole, part in zip(parameters[name].shape, tensor.shape, strict=True))
            parameters[name][last] = tensor.to(parameters[name].dtype)
    return sorted(taken)


def layer_weights(drafter: Drafter, target: TargetWeights) -> dict[str, Tensor]:
    """Weights of the target's last layers by the drafter's names, where the shapes fit.

    A projection of the target is half as wide as that of the drafter's first layer, whose second half sees the features. Its MLP may be
    narrower.
    """
    names = ["midlayer", *(f"layers.{number}" for number in drafter.layers)]
    before = target.config.get_text_config().num_hidden_layers - len(names)
    found = {}
    for number, (name, layer) in enumerate(zip(names, drafter.decoder, strict=True)):
        for part, parameter in layer.named_parameters():
            source = "input_layernorm.weight" if part == "hidden_norm.weight" else part
            tensor = target.find(f"layers.{before + number}.{source}")
            if tensor is not None and fits(part, tuple(tensor.shape), tuple(parameter.shape)):
                found[f"{name}.{part}"] = tensor
    return found


def fits(name: str, part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether weights of shape `part` of the target can be the last part of the weights `name` of a layer, of shape `whole`."""
    if name.startswith("mlp."):
        return all(size <= most for size, most in zip(part, whole, strict=True))
    return part in (whole, (*whole[:-1], whole[-1] // 2))


def start_from(drafter: Drafter, folder: Path, target: TargetWeights) -> list[str]:
    """Take over the weights of another drafter for the same target, in `folder` as SGLang loads it; the names taken.

    Its draft vocabulary may be another one: head rows of tokens that it lacks are the target's.
    Raises StageError when a weight is missing or has another shape, or when it has layers that `drafter` lacks.
    """
    found = engine_tensors(folder)
    parameters = dict(drafter.named_parameters())
    wrong = [
        f"{name} is {list(found[name].shape) if name in found else 'missing'}, must be {list(parameter.shape)}"
        for name, parameter in parameters.items()
        if name != "lm_head.weight" and (name not in found or found[name].shape != parameter.shape)
    ]
    extra = found.keys() - parameters.keys() - twins(parameters).keys()
    wrong += [f"{name} is there, must not be" for name in sorted(extra) if name.startswith("layers.")]
    size = drafter.config.hidden_size
    tables = [name for name in ("lm_head.weight", "d2t") if name not in found]
    if wrong or tables or found["lm_head.weight"].shape != (len(found["d2t"]), size):
        raise StageError(
            f"{folder}: {'; '.join([*wrong, *(f'{name} is missing' for name in tables)]) or 'lm_head.weight does not fit d2t'}: "
            "not a drafter of this target and these settings; look at it with `python -m scripts.export --check`"
        )
    head = target.head().clone()
    head[torch.arange(len(found["d2t"])) + found["d2t"]] = found["lm_head.weight"].to(head.dtype)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(head[drafter.target_ids] if name == "lm_head.weight" else found[name])
    return sorted(parameters)
