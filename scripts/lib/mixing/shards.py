"""A shuffle larger than memory: every input file is dealt out once to the shards, then every shard is put in order.

In memory at one time: the index, and one input file or one shard.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from scripts.lib.chat.rows import TOKEN_SCHEMA, write_table
from scripts.lib.ground.files import write_text
from scripts.lib.ground.manifest import Shard
from scripts.lib.mixing.index import TokenFile
from scripts.lib.mixing.split import seeded_hash


@dataclass(frozen=True)
class Plan:
    """Where every kept row goes: columns of the index, and `split`, `shard`, `position` (in its split)."""

    rows: pl.DataFrame

    def names(self) -> list[str]:
        """The shards' file names, train first."""
        pairs = self.rows.select("split", "shard").unique().sort("split", "shard", descending=[True, False])
        return [shard_name(split, shard) for split, shard in pairs.iter_rows()]


def shard_name(split: str, shard: int) -> str:
    """The file name of a shard."""
    return f"{split}-{shard:05d}.parquet"


def plan(index: pl.DataFrame, seed: int, rows_per_shard: int) -> Plan:
    """Order each split of `index` by a seeded hash of data set and id, and cut it into shards."""
    order = [seeded_hash(seed, "order", dataset, id_) for dataset, id_ in index.select("dataset", "id").iter_rows()]
    shuffled = index.with_columns(order=pl.Series(order, dtype=pl.UInt64)).sort("split", "order", "dataset", "id")
    placed = shuffled.with_columns(position=pl.int_range(pl.len()).over("split"))
    return Plan(placed.with_columns(shard=pl.col("position") // rows_per_shard))


def deal(file: TokenFile, plan: Plan, partial: Path) -> None:
    """Write the rows of `file` into one piece per shard that takes any; done already when its mark is there."""
    mark = partial / f"dealt-{file.number:06d}"
    if mark.exists():
        return
    places = plan.rows.filter(pl.col("file") == file.number).select("row", "split", "shard", "position")
    rows = pl.read_parquet(file.path).with_row_index("row").join(places, on="row", how="inner", maintain_order="left")
    for (split, shard), part in rows.partition_by("split", "shard", as_dict=True, include_key=False).items():
        path = pieces(partial, shard_name(str(split), int(shard))) / f"{file.number:06d}.arrow"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        part.drop("row").write_ipc(temporary, compression="lz4")
        os.replace(temporary, path)
    write_text(mark, "")


def pieces(partial: Path, name: str) -> Path:
    """The folder of the pieces of shard `name`."""
    return partial / name.removesuffix(".parquet")


def assemble(name: str, folder: Path, partial: Path) -> None:
    """Put the pieces of shard `name` in order and write it into `folder`; a shard that is there already is complete."""
    path = folder / name
    if path.exists():
        return
    parts = [pl.read_ipc(piece) for piece in sorted(pieces(partial, name).glob("*.arrow"))]
    write_table(path, pl.concat(parts).sort("position").select(TOKEN_SCHEMA.names()))


def described(plan: Plan, folder: Path) -> Sequence[Shard]:
    """The finished shards in `folder` with their figures."""
    sizes = {
        shard_name(split, shard): (rows, tokens)
        for split, shard, rows, tokens in plan.rows.group_by("split", "shard").agg(pl.len(), pl.col("tokens").sum()).iter_rows()
    }
    return [Shard.of(folder / name, *sizes[name]) for name in plan.names()]
