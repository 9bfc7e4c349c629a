"""The few tensors that a drafter takes from its target, read from the target's files without loading the model."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from scripts.lib.ground.errors import StageError

EMBEDDING, HEAD, NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
# A text model inside a larger one has its own prefix; the last one ends with a head that stands outside of the model.
PREFIXES = ("model.", "model.language_model.", "language_model.model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


class TargetWeights:
    """Tensors of the target in `folder` (HF layout) by their short names, such as `layers.29.mlp.up_proj.weight`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.config: PretrainedConfig = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise StageError(f"{folder}: no readable config.json of a target ({error}); run stage target again") from error
        self.files = tensor_files(folder)

    def find(self, name: str) -> Tensor | None:
        """The tensor called `name` inside the text model, as it is stored; None when the target has none."""
        stored = HEADS if name == HEAD else tuple(prefix + name for prefix in PREFIXES)
        for candidate in stored:
            if candidate in self.files:
                with safe_open(self.files[candidate], framework="pt") as file:
                    return file.get_tensor(candidate)
        return None

    def __getitem__(self, name: str) -> Tensor:
        """As `find`; StageError when there is none."""
        tensor = self.find(name)
        if tensor is None:
            raise StageError(
                f"{self.folder}: has no tensor {name}, which a drafter takes from its target; the target's layout is not supported"
            )
        return tensor

    def embedding(self) -> Tensor:
        """The token embedding [V, H]."""
        return self[EMBEDDING]

    def head(self) -> Tensor:
        """The output head [V, H]; the embedding when the two are tied."""
        tied = self.config.get_text_config().tie_word_embeddings
        return self[EMBEDDING] if tied else self[HEAD]


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which safetensors file of `folder` holds each tensor; StageError when one cannot be read."""
    found: dict[str, Path] = {}
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise StageError(f"{folder}: its weights cannot be read ({error}); run stage target again") from error
    if not found:
        raise StageError(f"{folder}: holds no *.safetensors; run stage target again")
    return found
