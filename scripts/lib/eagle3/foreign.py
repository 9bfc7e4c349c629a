"""Drafters of other trainers: their tensors under the names that we use."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from scripts.lib.ground.errors import StageError

# What SGLang's loader of `LlamaForCausalLMEagle3` takes for the same thing.
RENAMED = {"layers.0.": "midlayer.", "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}


def engine_name(name: str) -> str:
    """The name that we use for the tensor `name` of a checkpoint."""
    short = name.removeprefix("model.")
    return next((ours + short.removeprefix(theirs) for theirs, ours in RENAMED.items() if short.startswith(theirs)), short)


def engine_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the drafter in `folder` by the names that we use; StageError when there is none or two have one name."""
    found: dict[str, Tensor] = {}
    paths = sorted(folder.glob("*.safetensors"))
    try:
        tensors = [(name, tensor) for path in paths for name, tensor in load_file(path).items()]
    except (OSError, SafetensorError) as error:
        raise StageError(f"{folder}: not readable as safetensors ({error}); fetch or export the drafter again") from error
    for name, tensor in tensors:
        if engine_name(name) in found:
            raise StageError(f"{folder}: {engine_name(name)} is there twice, under different names; an engine takes whichever comes last")
        found[engine_name(name)] = tensor
    if not found:
        raise StageError(f"{folder}: no *.safetensors; give a drafter's folder as SGLang loads it")
    return found
