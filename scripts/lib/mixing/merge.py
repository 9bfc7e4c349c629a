"""Stage `merge`: the token rows of all data sets, shuffled, without copies and benchmark prompts, with a held-out split."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.chat.rows import VALUE_LENGTH, write_table
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import write_text
from scripts.lib.ground.manifest import Counts, Manifest
from scripts.lib.ground.progress import Progress
from scripts.lib.ground.stage import Job, Result
from scripts.lib.mixing.choice import choose
from scripts.lib.mixing.index import index_of, token_files
from scripts.lib.mixing.mix import contamination, mix_by_dataset, mix_page
from scripts.lib.mixing.settings import Settings
from scripts.lib.mixing.shards import Plan, assemble, deal, described, plan
from scripts.lib.mixing.split import with_split


def merge(job: Job, folder: Path) -> Result:
    """Write `train-*.parquet`, `eval-*.parquet`, `rejected.parquet` and `mix.md` into `folder`.

    The order in which the inputs are given does not matter. Raises StageError when there are no rows or a split is empty.
    """
    settings = Settings.of(job.settings)
    files = token_files(job.inputs["tokens"])
    if not files:
        raise StageError(f"{job.inputs['tokens'][0]}: none of the data sets has a token row; look at their rejected.parquet")
    index = pl.concat([index_of(file) for file in files])
    chosen = choose(index, job.consulted["prepared"], job.consulted["tasks"], settings)
    taken = chosen.filter(pl.col("reason").is_null()).drop("reason", "value")
    mix = plan(with_split(taken, settings.seed, settings.eval_share), settings.seed, settings.rows_per_shard)
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
    return Result(described_mix(job, folder, chosen, mix), {"rows_per_second": round(index.height / progress.seconds, 1)})


def described_mix(job: Job, folder: Path, chosen: pl.DataFrame, mix: Plan) -> Manifest:
    """Write what was left out, and the page; the manifest."""
    rejected = chosen.filter(pl.col("reason").is_not_null()).sort("dataset", "id")
    rejected = rejected.select("dataset", "id", "reason", pl.col("value").str.head(VALUE_LENGTH))
    write_table(folder / "rejected.parquet", rejected)
    table = mix_by_dataset(chosen, mix.rows)
    write_text(folder / "mix.md", mix_page(table, chosen, heading(job.settings)))
    reasons = dict(rejected.group_by("reason").len().sort("reason").iter_rows())
    facts = {
        **split_facts(mix.rows),
        "datasets": {row.pop("dataset"): row for row in table.to_dicts()},
        "contaminated": contamination(chosen),
    }
    counts = Counts(chosen.height, mix.rows.height, reasons)
    return Manifest(job.stage, job.settings, job.input_digests(), counts, described(mix, folder), facts)


def heading(settings: Mapping[str, Any]) -> list[str]:
    """What the page says of the settings."""
    options = ", ".join(f"{name.replace('_', ' ')} {value or 'off'}" for name, value in sorted(settings["merge"].items()))
    weights = "".join(f", weight of {name} {weight}" for name, weight in sorted(settings["weights"].items()))
    return [f"Seed {settings['seed']}, {options}{weights}. Rows are token rows; share is of the trained tokens."]


def split_facts(rows: pl.DataFrame) -> dict[str, dict[str, int]]:
    """Rows, tokens and trained tokens of each split."""
    figures = [pl.len().alias("rows"), pl.col("tokens").sum(), pl.col("trained_tokens").sum()]
    return {row.pop("split"): row for row in rows.group_by("split").agg(figures).sort("split").to_dicts()}
