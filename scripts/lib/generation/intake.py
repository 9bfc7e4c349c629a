"""Prepared rows, window by window, with the answers that an earlier attempt already got."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.generation.conversation import Conversation
from scripts.lib.generation.expectation import length_class
from scripts.lib.generation.segments import Segments
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import checked_shard, read_manifest

COLUMNS = ["id", "group", "prompt_hash", "tools", "partition", "prompt_tokens", "messages"]


@dataclass
class Opened:
    """One conversation and the records of its turns that are written already."""

    conversation: Conversation
    records: list[Mapping[str, Any]] = field(default_factory=list)


class Intake:
    """The rows behind the manifest of stage prepare; only one window of them is in memory at a time."""

    def __init__(self, manifest: Path, turns: str | int, window: int) -> None:
        self.turns, self.window = turns, window
        self.files = [checked_shard(manifest.parent, shard) for shard in read_manifest(manifest, "prepare").shards]
        ids = pl.concat([pl.scan_parquet(path).select("id") for path in self.files]).collect()["id"]
        twice = ids.filter(ids.is_duplicated())
        if len(twice):
            raise StageError(f"{manifest.parent}: {len(twice)} row ids come more than once, first {twice[0]}; rebuild stage prepare")
        self.rows = len(ids)

    def classes(self) -> Counter[int]:
        """Turns to write by the class of their expected length; a row without any counts as one of class 0, as it is rejected."""
        found: Counter[int] = Counter()
        for window in self._slices():
            for conversation in self._conversations(window):
                found.update(length_class(conversation, place) for place in conversation.places)
                found[0] += not conversation.places
        return found

    def count(self) -> int:
        """Turns to write, over all rows."""
        return self.classes().total()

    def partition(self) -> str:
        """The partition of the dataset."""
        name: str = pl.scan_parquet(self.files[0]).select("partition").head(1).collect().item()
        return name

    def windows(self, segments: Segments, index: pl.DataFrame) -> Iterator[list[Opened]]:
        """All conversations in order of the files, with their records from `segments`, which `index` describes."""
        for window in self._slices():
            known = index.join(window.select("id"), on="id", how="semi", maintain_order="left")
            records: dict[str, list[Mapping[str, Any]]] = {}
            for record in segments.read(known):
                records.setdefault(record["id"], []).append(record)
            yield [Opened(conversation, records.get(conversation.id, [])) for conversation in self._conversations(window)]

    def _slices(self) -> Iterator[pl.DataFrame]:
        """The rows, `window` at a time."""
        for path in self.files:
            table = pl.scan_parquet(path).select(COLUMNS)
            start = 0
            while (part := table.slice(start, self.window).collect()).height:
                yield part
                start += part.height

    def _conversations(self, window: pl.DataFrame) -> Iterator[Conversation]:
        for row in window.iter_rows(named=True):
            yield Conversation.of(row, self.turns)
