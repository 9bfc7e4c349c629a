"""States taken over from the folder that was published before: exactly those that would be computed again.

A row's states depend in their last bits on the rows that share its batch. So what is looked up is a whole batch, by its tokens and by all
else that decides what the engine gives: a run gives the same bytes whatever ran before it. Rows that are computed alone
(`hidden.batch_tokens: 1`) are found again in any mix.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from scripts.lib.engines.protocol import RowStates
from scripts.lib.ground.manifest import NAME, Shard, checked_shard, read_manifest
from scripts.lib.states.encoded import decoded
from scripts.lib.states.format import HiddenShard, final_borders
from scripts.lib.states.reader import read_shard
from scripts.lib.states.rows import TokenRow, content_name

TABLE = "batches.parquet"
SCHEMA = {"shard": pl.String, "row": pl.Int64, "batch": pl.String, "member": pl.Int64}


@dataclass(frozen=True)
class Place:
    """A row of a shard, by number."""

    shard: str
    row: int


class Earlier:
    """The states in `folder`, made under `context`: all that decides states beside the batch. Counts the rows `reused`."""

    def __init__(self, folder: Path, context: str) -> None:
        self.folder, self.context, self.reused = folder, context, 0
        self.shards, self.places = found(folder)
        self._opened = functools.cache(self._open)

    def batch(self, rows: Sequence[TokenRow]) -> str:
        """Names the batch of `rows`: equal names mean equal states."""
        return content_name(self.context, rows)

    def states(self, rows: Sequence[TokenRow]) -> list[RowStates] | None:
        """The states of the batch of `rows` if all of them were published before. Raises StageError for a shard that is damaged."""
        if not self.places:
            return None
        name = self.batch(rows)
        places = [self.places.get((name, member)) for member in range(len(rows))]
        known = [place for place in places if place]
        if len(known) < len(rows):
            return None
        self.reused += len(known)
        return [self._row(place) for place in known]

    def knows(self, rows: Sequence[TokenRow]) -> bool:
        """Whether `states` has those of the batch of `rows`."""
        if not self.places:
            return False
        name = self.batch(rows)
        return all((name, member) in self.places for member in range(len(rows)))

    def _row(self, place: Place) -> RowStates:
        shard, finals = self._opened(place.shard)
        start, end = shard.row_offsets[place.row : place.row + 2].tolist()
        teachers = slice(finals[place.row], finals[place.row + 1])
        return RowStates(decoded(shard.aux[start:end]), decoded(shard.final[teachers]), shard.argmax[teachers])

    def _open(self, name: str) -> tuple[HiddenShard, list[int]]:
        shard = read_shard(checked_shard(self.folder, self.shards[name]))
        return shard, final_borders(shard.row_offsets, shard.final_index)


def found(folder: Path) -> tuple[Mapping[str, Shard], Mapping[tuple[str, int], Place]]:
    """Shards of the published `folder`, and where each member of each batch is. Nothing when there is none, or its states are not exact."""
    if not (folder / TABLE).is_file() or not (folder / NAME).is_file():
        return {}, {}
    manifest = read_manifest(folder / NAME, "hidden")
    if manifest.facts["stored"] != "bfloat16":
        return {}, {}
    table = pl.read_parquet(folder / TABLE)
    return {shard.name: shard for shard in manifest.shards}, {
        (batch, member): Place(shard, row) for shard, row, batch, member in table.select(*SCHEMA).iter_rows()
    }


def write_table(folder: Path, members: Mapping[str, Sequence[tuple[str, int]]]) -> None:
    """Write which batch each row of each shard was computed in, and as which of its members."""
    rows = [(shard, row, batch, member) for shard, own in members.items() for row, (batch, member) in enumerate(own)]
    pl.DataFrame(rows, schema=SCHEMA, orient="row").write_parquet(folder / TABLE)
