"""Training rows from shards of hidden states.

Shapes: T tokens of a shard, S trained slots of a row, H hidden size.
"""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import sha256_text
from scripts.lib.ground.manifest import Manifest, Shard, checked_shard
from scripts.lib.states.format import HiddenShard
from scripts.lib.states.reader import check_finite, read_shard
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.slots import trained_slots

TURN = re.compile(r"#\d+$")


@dataclass(frozen=True)
class RowSet:
    """Rows of one split, the shard of each and its number in it, how many rows had no slot to train, how many a fraction left out."""

    rows: tuple[TrainingRow, ...]
    places: tuple[tuple[int, int], ...]
    untrained: int
    unused: int = 0

    @classmethod
    def of(cls, shards: Iterable[Iterable[TrainingRow]]) -> "RowSet":
        """The rows of `shards` that have a slot to train."""
        rows: list[TrainingRow] = []
        places: list[tuple[int, int]] = []
        untrained = 0
        for shard, content in enumerate(shards):
            for number, row in enumerate(content):
                if len(row.slots):
                    rows.append(row)
                    places.append((shard, number))
                else:
                    untrained += 1
        return cls(tuple(rows), tuple(places), untrained)

    @property
    def shards(self) -> list[int]:
        """The shard of each row."""
        return [shard for shard, _ in self.places]


def load_rows(folder: Path, manifest: Manifest, split: str) -> RowSet:
    """Rows of the shards `split`-*.safetensors of stage hidden in `folder`; states stay in the mapped files.

    Raises StageError for a shard that is altered, cut, or holds values that are not finite. All bytes are looked at, so that the shards
    are shared out to as many threads as torch has.
    """
    shards = [shard for shard in manifest.shards if shard.name.startswith(f"{split}-")]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return RowSet.of(pool.map(lambda shard: checked_rows(folder, shard), shards))


def checked_rows(folder: Path, shard: Shard) -> list[TrainingRow]:
    """The rows of `shard` in `folder`, once all of it is known to be good."""
    path = checked_shard(folder, shard)
    content = read_shard(path)
    check_finite(path, content)
    return list(shard_rows(path, content))


def thinned(found: RowSet, fraction: float, seed: int) -> RowSet:
    """The rows of that `fraction` of all conversations whose seeded hashes are the smallest: a smaller fraction lies inside a larger one.

    Rows of one conversation stay together: their ids differ in the turn alone, which stands behind `#`.
    """
    kept = [index for index, row in enumerate(found.rows) if place(row.id, seed) < fraction]
    rows, places = tuple(found.rows[index] for index in kept), tuple(found.places[index] for index in kept)
    return RowSet(rows, places, found.untrained, len(found.rows) - len(kept))


def place(row_id: str, seed: int) -> float:
    """Where the conversation of a row stands in [0, 1), by a hash of its id and `seed` alone."""
    conversation = TURN.sub("", row_id)
    return int(sha256_text(f"{seed}\x1ffraction\x1f{conversation}")[:13], 16) / 16**13


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
