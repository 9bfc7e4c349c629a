"""Opens the engine that the config names."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.lib.engines.protocol import TargetEngine
from scripts.lib.engines.transformers_engine import TransformersEngine, load_target
from scripts.lib.ground.errors import StageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class EngineSettings:
    """Which engine, in which dtype, where, and how it samples."""

    engine: str
    dtype: str
    device: str
    threads: int
    temperature: float = 0.0
    seed: int = 0


def open_engine(settings: EngineSettings, folder: Path, eos_ids: frozenset[int]) -> TargetEngine:
    """The engine with the target in `folder`. Raises StageError for an engine or dtype that aerie does not know."""
    if settings.engine != "transformers":
        raise StageError(f"engine {settings.engine!r} is not known; set engine: transformers")
    if settings.dtype not in DTYPES:
        raise StageError(f"dtype {settings.dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    torch.set_num_threads(settings.threads)
    return TransformersEngine(load_target(folder, DTYPES[settings.dtype], settings.device), eos_ids, settings.temperature, settings.seed)


@dataclass(frozen=True)
class TargetShape:
    """What the target's config says: layers, hidden size H, and the positions that it was made for."""

    layers: int
    hidden_size: int
    context: int

    @classmethod
    def of(cls, folder: Path) -> "TargetShape":
        """Read `config.json` of the target in `folder`."""
        config = json.loads((folder / "config.json").read_text())
        return cls(config["num_hidden_layers"], config["hidden_size"], config["max_position_embeddings"])
