"""A GGUF file as an HF layout."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.lib.ground.errors import StageError

SLOW = ("GGUFReader", "get_tensor_name_map")


def convert_gguf(path: Path, folder: Path) -> None:
    """Write model (bf16), tokenizer and chat template of the GGUF file at `path` into `folder`.

    Raises StageError when transformers cannot read the file.
    """
    place: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        with remembered():
            tokenizer = AutoTokenizer.from_pretrained(**place)
            model = AutoModelForCausalLM.from_pretrained(**place, **dequantized(), dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise StageError(
            f"{path.name}: transformers {transformers.__version__} cannot convert it ({error}); use a model in HF layout"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def dequantized() -> dict[str, Any]:
    """The argument that makes transformers unpack quantised weights: needed from 5.19 on, unknown before."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Let gguf parse the file and build its name map once for tokenizer, config and weights.

    transformers parses the file for each of the three and builds the map for every submodule: two thirds of the time.
    """
    originals = {name: getattr(gguf, name) for name in SLOW}
    for name, original in originals.items():
        setattr(gguf, name, functools.lru_cache(maxsize=1)(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)
