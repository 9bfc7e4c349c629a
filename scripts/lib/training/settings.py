"""What one drafter's section of the config says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scripts.lib.ground.errors import StageError
from scripts.lib.training.objectives import objective
from scripts.lib.training.optimizers import ADAMW, MUON
from scripts.lib.training.stepping import Recipe

FP8 = "fp8"  # products of numbers in 8 bits, everything else as in bfloat16


@dataclass(frozen=True)
class TrainSettings:
    """How to train. `batch_tokens` counts trained tokens of one optimizer step, in whole rows: it sets the noise of a step.

    `micro_tokens` counts those that are computed at a time: it sets the memory. `optimizer` is adamw or muon. `layers` counts the
    drafter's decoder layers, `intermediate_size` is that of their MLPs, None the target's. `fraction` is the share of the training
    conversations.
    """

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
    micro_tokens: int = 8192
    optimizer: str = ADAMW
    layers: int = 1
    intermediate_size: int | None = None
    loss: str = "soft"
    kl_scale: float = 1.0
    kl_decay: float = 1.0
    fc_norm: bool = False
    norm_output: bool = False
    start_from: str | None = None
    patience: int = 0
    keep_best: bool = False
    fraction: float = 1.0
    order: str = "rows"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "TrainSettings":
        """From the stage's settings `{"drafter": {...}, "name", "seed"}`."""
        return cls(name=settings["name"], seed=settings["seed"], **settings["drafter"])

    def recipe(self, device: str, runtime: Mapping[str, Any]) -> Recipe:
        """How a step is computed on `device`; `runtime` may say `recompute` and `shard`, which move only the last bits of sums.

        Raises StageError when weights are to be spread over ranks that Muon wants whole.
        """
        if self.optimizer == MUON and runtime.get("shard"):
            raise StageError(
                f"drafters.{self.name}.optimizer is muon, whose step is made of whole matrices, and runtime.shard spreads them over ranks: "
                "set `shard: false`, or the optimizer to adamw"
            )
        judge = objective(self.loss, self.kl_scale, self.kl_decay)
        fp8, ways = self.precision == FP8, (runtime.get("recompute", False), runtime.get("shard", False))
        dtype = torch.bfloat16 if fp8 else getattr(torch, self.precision)
        return Recipe(dtype, device, self.ttt_decay, self.clip, judge, *ways, self.optimizer, fp8)
