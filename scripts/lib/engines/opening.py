"""Opens the engine that the config names."""

import functools
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from scripts.lib.engines.protocol import TargetEngine
from scripts.lib.engines.settings import EngineSettings
from scripts.lib.engines.transformers_engine import TransformersEngine, load_target
from scripts.lib.ground.errors import StageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_engine(settings: EngineSettings, folder: Path, eos_ids: frozenset[int]) -> TargetEngine:
    """The engine with the target in `folder`. Raises StageError for an engine or dtype that aerie does not know."""
    if settings.engine != "transformers":
        raise StageError(f"engine {settings.engine!r} is not known; set engine: transformers")
    if settings.dtype not in DTYPES:
        raise StageError(f"dtype {settings.dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    torch.set_num_threads(settings.threads)
    model = load_target(folder, DTYPES[settings.dtype], settings.device, settings.device_map)
    return TransformersEngine(model, eos_ids, settings.temperature, settings.seed)


def once(opener: Callable[[], TargetEngine]) -> Callable[[], TargetEngine]:
    """Gives the engine of `opener`, which is called when the first of whatever threads asks."""
    lock, opened = threading.Lock(), functools.cache(opener)

    def ask() -> TargetEngine:
        with lock:
            return opened()

    return ask
