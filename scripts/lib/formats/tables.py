"""Prepared and rejected rows as Parquet."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.chat.messages import TEXTS
from scripts.lib.chat.rows import write_table
from scripts.lib.ground.manifest import Shard

ROWS_PER_SHARD = 65536
MESSAGE = pl.Struct({name: pl.String for name in ("role", *TEXTS)})
ROWS: dict[str, Any] = {
    "id": pl.String,
    "group": pl.String,
    "source_row": pl.Int64,
    "messages": pl.List(MESSAGE),
    "tools": pl.String,
    "kind": pl.String,
    "partition": pl.String,
    "prompt_tokens": pl.Int64,
    "prompt_hash": pl.String,
    "signature": pl.Binary,
}
REJECTED: dict[str, Any] = {"source_row": pl.Int64, "reason": pl.String, "value": pl.String}


def write_rows(folder: Path, rows: Iterable[Mapping[str, Any]]) -> list[Shard]:
    """Write `rows` sorted by id as rows-00000.parquet, …; a shard's tokens are those of its prompts."""
    ordered = sorted(rows, key=lambda row: row["id"])
    shards = []
    for number, start in enumerate(range(0, len(ordered), ROWS_PER_SHARD)):
        part = ordered[start : start + ROWS_PER_SHARD]
        path = folder / f"rows-{number:05d}.parquet"
        write_table(path, pl.DataFrame(part, schema=ROWS, orient="row"))
        shards.append(Shard.of(path, len(part), sum(row["prompt_tokens"] for row in part)))
    return shards


def write_rejected(folder: Path, rejected: Sequence[tuple[int, str, str]]) -> Path:
    """Write rejected.parquet, sorted by source row, and give its path. Rows that were only not sampled are counted, not listed."""
    path = folder / "rejected.parquet"
    write_table(path, pl.DataFrame(sorted(rejected), schema=REJECTED, orient="row"))
    return path
