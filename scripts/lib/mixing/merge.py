"""Stage `merge`: the token rows of all data sets, shuffled, without duplicates, with a held-out split."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.chat.rows import write_table
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import write_text
from scripts.lib.ground.manifest import Counts, Manifest
from scripts.lib.ground.progress import Progress
from scripts.lib.ground.stage import Job, Result
from scripts.lib.mixing.index import index_of, token_files, without_duplicates
from scripts.lib.mixing.mix import mix_by_dataset, mix_page
from scripts.lib.mixing.shards import assemble, deal, described, plan
from scripts.lib.mixing.split import with_split


@dataclass(frozen=True)
class Settings:
    """Seed of split and shuffle, share of the conversation groups held out, rows of one output shard."""

    seed: int
    eval_share: float
    rows_per_shard: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Settings":
        """From the config slice of a job."""
        return cls(settings["seed"], settings["merge"]["eval_share"], settings["merge"]["rows_per_shard"])


def merge(job: Job, folder: Path) -> Result:
    """Write `train-*.parquet`, `eval-*.parquet`, `rejected.parquet` and `mix.md` into `folder`.

    The order in which the inputs are given does not matter. Raises StageError when there are no rows or a split is empty.
    """
    settings = Settings.of(job.settings)
    files = token_files(job.inputs["tokens"])
    if not files:
        raise StageError(f"{job.inputs['tokens'][0]}: none of the data sets has a token row; look at their rejected.parquet")
    index = pl.concat([index_of(file) for file in files])
    kept, rejected = without_duplicates(index)
    mix = plan(with_split(kept, settings.seed, settings.eval_share), settings.seed, settings.rows_per_shard)
    partial = folder / "partial"
    partial.mkdir(exist_ok=True)
    names = mix.names()
    progress = Progress(folder, len(files) + len(names), "files")
    for file in files:
        deal(file, mix, partial)
        progress.add(1, note="dealing")
    for name in names:
        assemble(name, folder, partial)
        progress.add(1, note="assembling")
    write_table(folder / "rejected.parquet", rejected)
    table = mix_by_dataset(mix.rows)
    write_text(folder / "mix.md", mix_page(table, settings.seed, settings.eval_share, rejected.height))
    counts = Counts(index.height, kept.height, {"duplicate": rejected.height} if rejected.height else {})
    facts = {**split_facts(mix.rows), "datasets": {row.pop("dataset"): row for row in table.to_dicts()}}
    manifest = Manifest(job.stage, job.settings, job.input_digests(), counts, described(mix, folder), facts)
    return Result(manifest, {"rows_per_second": round(index.height / progress.seconds, 1)})


def split_facts(rows: pl.DataFrame) -> dict[str, dict[str, int]]:
    """Rows, tokens and trained tokens of each split."""
    figures = [pl.len().alias("rows"), pl.col("tokens").sum(), pl.col("trained_tokens").sum()]
    return {row.pop("split"): row for row in rows.group_by("split").agg(figures).sort("split").to_dicts()}
