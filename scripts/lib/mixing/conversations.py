"""What was asked in every conversation that the mix may take, and in every benchmark task."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from scripts.lib.chat.signature import UNSPACED
from scripts.lib.ground.manifest import checked_shard, read_manifest

CHARACTERS_AT_ONCE = 16_000_000  # of what users say: bounds the words in memory
ROWS_AT_ONCE = 2048  # and of the messages
WORD = f"[{UNSPACED}]|[\\w--[{UNSPACED}]]+"
ROLE, CONTENT = (pl.element().struct.field(name) for name in ("role", "content"))
IS_USER = ROLE == "user"
ANSWERED = (ROLE == "assistant").cast(pl.Int8).cum_max() == 1


def read_prompts(manifest: Path) -> Iterator[pl.DataFrame]:
    """The prepared rows behind `manifest` as tables of at most about `CHARACTERS_AT_ONCE` characters that users say.

    Columns: source, id, group, kind, prompt_hash, signature, asked (all that the user says, in one case and single spaces),
    asked_hash, later_hash (of what the user says after the first answer). Hashes are polars' own and hold within one process.
    """
    published = read_manifest(manifest, "prepare")
    for shard in published.shards:
        if shard.name.startswith("rows-"):
            for table in row_groups(checked_shard(manifest.parent, shard), shard.rows):
                yield from pieces(table.select(pl.lit(published.settings["name"]).alias("source"), pl.all()))


def row_groups(path: Path, rows: int) -> Iterator[pl.DataFrame]:
    """What is read of the prepared rows in `path`, some thousand rows at a time."""
    asked = normalised(said(IS_USER))
    later = normalised(said(IS_USER & ANSWERED))
    for start in range(0, rows, ROWS_AT_ONCE):
        part = pl.scan_parquet(path).slice(start, ROWS_AT_ONCE)
        yield part.select(
            "id", "group", "kind", "prompt_hash", "signature", asked.alias("asked"), asked_hash=asked.hash(), later_hash=later.hash()
        ).collect()


def said(chosen: pl.Expr) -> pl.Expr:
    """The contents of the `chosen` messages of a row, one a line."""
    return pl.col("messages").list.eval(CONTENT.filter(chosen)).list.join("\n", ignore_nulls=True)


def normalised(text: pl.Expr) -> pl.Expr:
    """`text` in one Unicode form, lower case and single spaces."""
    return text.str.normalize("NFKC").str.to_lowercase().str.replace_all(r"\s+", " ").str.strip_chars()


def pieces(table: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """`table` cut where its `asked` gets long."""
    size = table["asked"].str.len_chars().cum_sum() // CHARACTERS_AT_ONCE
    yield from table.with_columns(size=size).partition_by("size", maintain_order=True, include_key=False)


def words(asked: pl.Series) -> tuple[np.ndarray, np.ndarray]:
    """Hashes u64 [N] of the words of all texts end to end, and the words i64 [R] of each text; a text without any counts one."""
    lists = asked.fill_null("").str.extract_all(WORD)
    # An empty list is filled beforehand: of several in a row `explode` keeps fewer than one each (polars 2.1.0).
    lists = pl.select(pl.when(lists.list.len() > 0).then(lists).otherwise(pl.lit([""]))).to_series()
    return lists.explode().hash().to_numpy(), lists.list.len().to_numpy().astype(np.int64)


def all_prompts(manifests: Sequence[Path]) -> Iterator[pl.DataFrame]:
    """`read_prompts` of several manifests, in order of name."""
    for manifest in sorted(manifests, key=lambda path: str(read_manifest(path, "prepare").settings["name"])):
        yield from read_prompts(manifest)
