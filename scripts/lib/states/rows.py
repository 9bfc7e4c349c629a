"""Token rows, and how they are cut into shards."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import polars as pl

from scripts.lib.ground.files import canonical
from scripts.lib.ground.manifest import checked_shard, read_manifest
from scripts.lib.states.storing import Storing

SPLITS = ("train", "eval")
FRAME_BYTES = 512  # of a compressed row beyond its share: offsets, and the tables of the entropy coder
LENGTHS = {
    "tokens": pl.col("input_ids").list.len(),
    "teachers": pl.col("loss_spans").list.eval((pl.element().struct["end"] - pl.element().struct["start"] - 1).clip(0)).list.sum(),
    "spans": pl.col("loss_spans").list.len(),
}


@dataclass(frozen=True)
class TokenRow:
    """One row: `spans` are half-open ranges of `input_ids` that the target generated."""

    id: str
    input_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    dataset: str = ""

    @cached_property
    def ids(self) -> np.ndarray:
        """`input_ids`, i32 [T]."""
        return np.array(self.input_ids, np.int32)

    @cached_property
    def final_index(self) -> tuple[int, ...]:
        """Positions whose final state teaches: all of a span but its last."""
        return tuple(chain.from_iterable(range(start, end - 1) for start, end in self.spans))


@dataclass(frozen=True)
class ShardPlan:
    """Rows `first` to `first + rows - 1` of a split, without the rejected ones, that go into one file: `kept` of them."""

    name: str
    files: tuple[Path, ...]
    context: int
    first: int
    rows: int
    tokens: int
    teachers: int
    spans: int
    kept: int

    def read(self) -> list[TokenRow]:
        """The rows of the shard, in merged order."""
        frame = pl.scan_parquet(list(self.files)).slice(self.first, self.rows).with_columns(**LENGTHS).collect()
        kept = frame.filter(rejection(self.context).is_null())
        ids, end = kept["input_ids"].explode().to_numpy(), 0
        rows = []
        for name, tokens, spans, dataset in kept.select("id", "tokens", "loss_spans", "dataset").iter_rows():
            start, end = end, end + tokens
            rows.append(TokenRow(name, tuple(ids[start:end].tolist()), tuple((span["start"], span["end"]) for span in spans), dataset))
        return rows

    def bytes(self, hidden_size: int, storing: Storing) -> int:
        """Size of the file, give or take its header: states, 4 bytes of id a token, 12 of place and argmax a teacher, spans and offsets."""
        states = storing.state_bytes(self.tokens, self.teachers, hidden_size)
        frames = 0 if storing.compression == "none" else FRAME_BYTES * self.rows
        return math.ceil(states) + 4 * self.tokens + 12 * self.teachers + 16 * (self.spans + self.rows) + frames + 4096


def rejection(context: int) -> pl.Expr:
    """Why a row is left out, null for a row that is not."""
    too_long = pl.when(pl.col("tokens") > context).then(pl.lit("context_full"))
    return pl.when(pl.col("teachers") == 0).then(pl.lit("no_trained_position")).otherwise(too_long.otherwise(None))


def digest(rows: Sequence[TokenRow]) -> str:
    """Names the content of `rows`, with their ids."""
    return content_name("", rows, [row.id for row in rows])


def content_name(context: str, rows: Sequence[TokenRow], ids: Iterable[str] = ()) -> str:
    """Names `context`, the tokens and spans of `rows`, and `ids`.

    Tokens are hashed as they lie in memory: as text they take several times as long, while all other threads wait.
    """
    found = hashlib.sha256(canonical([context, [[len(row.input_ids), row.spans] for row in rows], list(ids)]).encode())
    for row in rows:
        found.update(row.ids.astype("<i4", copy=False).data)
    return found.hexdigest()


def plan_shards(manifest: Path, tokens_per_shard: int, context: int) -> tuple[list[ShardPlan], Counter[str]]:
    """Shards of all splits of the merged rows behind `manifest`, and how many rows are left out for which reason."""
    shards = read_manifest(manifest, "merge").shards
    plans: list[ShardPlan] = []
    rejected: Counter[str] = Counter()
    for split in SPLITS:
        files = [checked_shard(manifest.parent, shard) for shard in shards if shard.name.startswith(f"{split}-")]
        if files:
            lengths = pl.scan_parquet(files).select(**LENGTHS).with_columns(reason=rejection(context)).collect()
            rejected.update(lengths["reason"].drop_nulls())
            plans += [ShardPlan(name, tuple(files), context, *sums) for name, *sums in cut(split, lengths, tokens_per_shard)]
    return plans, rejected


def cut(split: str, lengths: pl.DataFrame, tokens_per_shard: int) -> Iterator[tuple[str, int, int, int, int, int, int]]:
    """Name, first row and sums of each shard: consecutive rows of at most `tokens_per_shard` tokens, or one longer row."""
    numbers, number, filled = [], 0, 0
    for tokens, reason in lengths.select("tokens", "reason").iter_rows():
        size = 0 if reason else tokens
        if filled and filled + size > tokens_per_shard:
            number, filled = number + 1, 0
        filled += size
        numbers.append(number)
    kept = pl.col("reason").is_null()
    sums = [*(pl.col(name).filter(kept).sum() for name in LENGTHS), kept.sum().alias("kept")]
    table = lengths.with_columns(number=pl.Series(numbers, dtype=pl.Int64)).with_row_index("first")
    parts = table.group_by("number", maintain_order=True).agg(pl.col("first").min(), pl.len(), *sums)
    for row in parts.filter(pl.col("tokens") > 0).iter_rows():
        yield f"{split}-{row[0]:05d}.safetensors", *row[1:]
