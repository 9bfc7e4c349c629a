"""What the mix must know of every token row, without its tokens."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import checked_shard, read_manifest


@dataclass(frozen=True)
class TokenFile:
    """One checked `tokens-*.parquet` and its place in the order of all."""

    number: int
    path: Path


def token_files(manifests: Sequence[Path]) -> list[TokenFile]:
    """The data files behind `manifests`, ordered by data set and file name, whatever the order of `manifests`.

    Raises StageError when two manifests are of one data set.
    """
    named = sorted((str(read_manifest(path, "encode").settings["name"]), path) for path in manifests)
    for (name, first), (other, second) in pairwise(named):
        if name == other:
            raise StageError(f"{second}: data set {name} is also in {first}; give each data set once")
    files = []
    for _, path in named:
        shards = sorted(read_manifest(path, "encode").shards, key=lambda shard: shard.name)
        files += [checked_shard(path.parent, shard) for shard in shards]
    return [TokenFile(number, path) for number, path in enumerate(files)]


def index_of(file: TokenFile) -> pl.DataFrame:
    """One row per token row of `file`: where it lies, what decides its place in the mix, and its sizes.

    Columns: file, row, dataset, id, group, prompt_hash, digest (of the ids, 32 hex digits), tokens, trained_tokens.
    """
    frame = pl.read_parquet(file.path).with_row_index("row")
    span_lengths = pl.col("loss_spans").list.eval(pl.element().struct.field("end") - pl.element().struct.field("start"))
    return frame.select(
        pl.lit(file.number, dtype=pl.Int64).alias("file"),
        "row",
        "dataset",
        "id",
        "group",
        "prompt_hash",
        pl.Series("digest", digests(frame["input_ids"]), dtype=pl.String),
        pl.col("input_ids").list.len().cast(pl.Int64).alias("tokens"),
        span_lengths.list.sum().alias("trained_tokens"),
    )


def digests(ids: pl.Series) -> list[str]:
    """One digest per list of token ids; equal lists, and only they, have equal digests."""
    ends = np.cumsum(ids.list.len().to_numpy())
    flat = np.ascontiguousarray(ids.explode().to_numpy(), dtype=np.int64)
    return [
        hashlib.blake2b(flat[start:end].tobytes(), digest_size=16).hexdigest() for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
