"""The tracked settings of stage generate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.lib.engines.settings import EngineSettings
from scripts.lib.ground.errors import StageError

CHOICES = {"turns": ("first", "all", "last"), "truncated": ("keep", "drop")}


@dataclass(frozen=True)
class GenerateSettings:
    """`max_tokens` is the longest answer by partition, `batch` the turns of one batch, `name` the dataset."""

    name: str
    seed: int
    engine: str
    dtype: str
    batch: int
    turns: str | int
    temperature: float
    max_tokens: Mapping[str, int]
    truncated: str

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "GenerateSettings":
        """Read the slice `{"generate": {...}, "name": ..., "seed": ...}`. Raises StageError for a value that is none of the choices."""
        section = settings["generate"]
        for option, choices in CHOICES.items():
            counted = option == "turns" and isinstance(section[option], int) and section[option] > 0
            if section[option] not in choices and not counted:
                raise StageError(f"generate.{option}: {section[option]!r} is none of {', '.join(choices)}")
        return cls(name=settings["name"], seed=settings["seed"], **section)

    def opening(self, runtime: Mapping[str, Any]) -> EngineSettings:
        """How to open the engine on the machine that `runtime` describes."""
        return EngineSettings(self.engine, self.dtype, runtime["device"], runtime["threads"], self.temperature, self.seed)
