"""Training rows from shards of hidden states.

Shapes: T tokens of a shard, S trained slots of a row, H hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Manifest, checked_shard
from scripts.lib.states.format import HiddenShard
from scripts.lib.states.reader import check_finite, read_shard
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.slots import trained_slots


@dataclass(frozen=True)
class RowSet:
    """Rows of one split, and how many rows of the shards had no slot to train."""

    rows: tuple[TrainingRow, ...]
    untrained: int


def load_rows(folder: Path, manifest: Manifest, split: str) -> RowSet:
    """Rows of the shards `split`-*.safetensors of stage hidden in `folder`; states stay in the mapped files.

    Raises StageError for a shard that is altered, cut, or holds values that are not finite.
    """
    rows: list[TrainingRow] = []
    untrained = 0
    for shard in manifest.shards:
        if shard.name.startswith(f"{split}-"):
            path = checked_shard(folder, shard)
            content = read_shard(path)
            check_finite(path, content)
            for row in shard_rows(path, content):
                if len(row.slots):
                    rows.append(row)
                else:
                    untrained += 1
    return RowSet(tuple(rows), untrained)


def shard_rows(path: Path, shard: HiddenShard) -> Iterator[TrainingRow]:
    """The rows of `shard`, read from `path`, in its order."""
    borders = shard.row_offsets.tolist()
    spans = shard.loss_spans.tolist()
    for number, (start, end) in enumerate(pairwise(borders)):
        inside = [(first - start, last - start) for first, last in spans if start <= first and last <= end]
        slots, remaining = trained_slots(inside)
        length = int(slots[-1]) + 1 if len(slots) else 0
        teachers = unbroken(teacher_rows(path, shard, slots + 1 + start))
        yield TrainingRow(
            id=shard.ids[number],
            tokens=shard.input_ids[start : start + length + 1],
            aux=shard.aux[start : start + length],
            slots=slots,
            remaining=remaining,
            final=shard.final[teachers],
            argmax=shard.argmax[teachers],
        )


def unbroken(places: Tensor) -> slice | Tensor:
    """Ascending `places` i64[S] as a range if none is left out, so that states stay in the mapped file."""
    whole = len(places) > 0 and int(places[-1]) - int(places[0]) + 1 == len(places)
    return slice(int(places[0]), int(places[-1]) + 1) if whole else places


def teacher_rows(path: Path, shard: HiddenShard, positions: Tensor) -> Tensor:
    """Where the states of token `positions` i64[S] of `shard` stand among its final states, i64[S]."""
    places = torch.searchsorted(shard.final_index, positions)
    found = places < len(shard.final_index)
    if not found.all() or not torch.equal(shard.final_index[places], positions):
        lost = positions[~found] if not found.all() else positions[shard.final_index[places] != positions]
        raise StageError(f"{path}: has no final state for token {int(lost[0])} of the shard, which a loss span needs; rebuild stage hidden")
    return places
