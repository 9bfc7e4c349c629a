"""What one drafter's section of the config says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainSettings:
    """How to train. `batch_tokens` counts trained tokens of one optimizer step, in whole rows: it sets the noise of a step."""

    name: str
    seed: int
    epochs: int
    batch_tokens: int
    learning_rate: float
    warmup_share: float
    clip: float
    ttt_steps: int
    ttt_decay: float
    warm_start: bool
    precision: str
    eval_every: int
    checkpoint_every: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "TrainSettings":
        """From the stage's settings `{"drafter": {...}, "name", "seed"}`."""
        return cls(name=settings["name"], seed=settings["seed"], **settings["drafter"])
