"""An HF layout that is there already: taken as it is when its weights are bf16 safetensors, else converted."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.lib.ground.errors import StageError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")
FLOATS = {"F64", "F32", "F16", "BF16"}


def place_layout(source: Path, folder: Path) -> str:
    """Put the HF layout in `source` into `folder` in bf16; returns how: "hard-linked", "copied" or "converted".

    Raises StageError when `source` is no HF layout or is quantised.
    """
    if not (source / "config.json").is_file():
        raise StageError(f"{source}: no config.json, so no HF layout; give a folder with config.json, weights and tokenizer")
    if "quantization_config" in json.loads((source / "config.json").read_text()):
        raise StageError(f"{source}: quantised weights; hidden states are taken in bf16, so choose the model's unquantised release")
    weights = sorted(source.glob("*.safetensors"))
    if weights and {dtype for path in weights for dtype in dtypes(path)} & FLOATS == {"BF16"}:
        linked = [linked_or_copied(path, folder / path.name) for path in weights]
        for path in small_files(source):
            shutil.copyfile(path, folder / path.name)
        return "hard-linked" if all(linked) else "copied"
    convert(source, folder)
    return "converted"


def small_files(source: Path) -> Iterator[Path]:
    """Config, tokenizer and template files: every visible file of `source` that holds no weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.suffix not in WEIGHTS:
            yield path


def dtypes(path: Path) -> set[str]:
    """The dtypes in the header of a safetensors file, in its own names."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


def linked_or_copied(source: Path, target: Path) -> bool:
    """Give `source`'s bytes the name `target` too; True as a hard link, False as a copy, on another file system."""
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
        return False
    return True


def convert(source: Path, folder: Path) -> None:
    """Load the model in `source` in bf16 and save it with its tokenizer in `folder`."""
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise StageError(f"{source}: transformers cannot load it ({error}); check its files, or use a newer transformers") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
