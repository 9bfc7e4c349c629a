"""Which rows each optimizer step sees, and with which learning rate: functions of settings alone."""

import math
from dataclasses import dataclass

from scripts.lib.training.batches import epoch_order, order_by_shard
from scripts.lib.training.packing import NEIGHBOURS, size_of, split, spread
from scripts.lib.training.rows import RowSet
from scripts.lib.training.settings import TrainSettings


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step: its epoch (from 0), indices of the rows of each batch, its learning rate, and how many draft steps it unrolls."""

    epoch: int
    batches: tuple[tuple[int, ...], ...]
    learning_rate: float
    draft_steps: int


def row_order(found: RowSet, settings: TrainSettings, epoch: int) -> list[int]:
    """The order of the rows in `epoch`: all of them shuffled, or a shard after the other."""
    if settings.order == "shards":
        return order_by_shard(found.shards, settings.seed, epoch)
    return epoch_order(len(found.rows), settings.seed, epoch)


def plan(found: RowSet, settings: TrainSettings, ranks: int = 1) -> list[PlannedStep]:
    """All steps of a run over the rows `found`, the rows of each in batches for `ranks` processes.

    The first half of them drafts one step only, which costs a third: later steps build on the first one, and learn from a good one.
    """
    sizes, neighbours = [size_of(row) for row in found.rows], 1 if settings.order == "shards" else NEIGHBOURS
    packs = [
        (epoch, tuple(tuple(batch) for batch in split(sizes, indices, settings.micro_tokens, ranks)))
        for epoch in range(settings.epochs)
        for indices in spread(sizes, row_order(found, settings, epoch), settings.batch_tokens, neighbours)
    ]
    single = len(packs) // 2
    return [
        PlannedStep(epoch, batches, learning_rate(step, len(packs), settings), 1 if step < single else settings.ttt_steps)
        for step, (epoch, batches) in enumerate(packs)
    ]


def learning_rate(step: int, steps: int, settings: TrainSettings) -> float:
    """Linear warm-up over the first `warmup_share` of `steps`, then half a cosine down to zero."""
    warmup = max(round(settings.warmup_share * steps), 1)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))) / 2
