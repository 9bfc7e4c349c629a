"""Stage calibrate: a seeded sample of a dataset's prepared rows, answered as stage generate would, and what that says of all rows."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.chat.rows import write_table
from scripts.lib.generation.build import generate
from scripts.lib.generation.intake import Intake
from scripts.lib.generation.settings import GenerateSettings
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import sha256_text
from scripts.lib.ground.manifest import Counts, Manifest, Shard, checked_shard, read_manifest
from scripts.lib.ground.stage import Job, Result, remove
from scripts.lib.watching.calibration import Sample, foretold

ROWS = 128
WINDOW = 4096  # rows in memory while turns are counted


def calibrate(job: Job, folder: Path) -> Result:
    """Answer ROWS rows and say what all turns take: tokens in the manifest's facts, hours in the cost.

    The hours hold for the machine that it ran on. Raises StageError when the dataset has no rows, or too many answers fail.
    """
    settings = GenerateSettings.of(job.settings)
    rows = sampled(job.input("prepared"), settings.seed)
    asked = replace(job, stage="generate", inputs=dict(job.inputs) | {"prepared": (publish_sample(folder / "partial/sample", rows),)})
    generated = generate(asked, folder / "partial/generate")
    answers = pl.concat([pl.read_parquet(folder / "partial/generate" / shard.name) for shard in generated.manifest.shards])
    turns = Intake(job.input("prepared"), settings.turns, WINDOW).count()
    sample = measured(answers, rows["partition"][0], settings, job.runtime, generated.cost["tokens_per_second"])
    found = foretold(sample, turns, settings.seed)
    facts = {
        "unit": "turns",
        "turns": turns,
        "mean_tokens": round(sum(sample.tokens) / answers.height, 1),
        "cut": sum(sample.cut),
        "tokens": [round(value) for value in found.tokens],
    }
    cost = {"hours": [round(value / 3600, 4) for value in found.seconds], "tokens_per_second": generated.cost["tokens_per_second"]}
    counts = generated.manifest.counts
    remove(folder / "partial")
    return Result(Manifest("calibrate", job.settings, job.input_digests(), counts, [], facts), cost)


def sampled(manifest: Path, seed: int) -> pl.DataFrame:
    """ROWS prepared rows, those with the smallest hash of seed and id. Raises StageError when there are none."""
    shards = [checked_shard(manifest.parent, shard) for shard in read_manifest(manifest, "prepare").shards]
    ids = pl.concat([pl.scan_parquet(path).select("id") for path in shards]).collect()["id"].to_list()
    if not ids:
        raise StageError(f"{manifest}: no rows to calibrate with; look at its rejected.parquet")
    chosen = sorted(ids, key=lambda name: sha256_text(f"{seed}/{name}"))[:ROWS]
    return pl.concat([pl.scan_parquet(path).filter(pl.col("id").is_in(chosen)) for path in shards]).collect().sort("id")


def publish_sample(folder: Path, rows: pl.DataFrame) -> Path:
    """The rows as a folder of stage prepare; returns its manifest's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows-00000.parquet"
    write_table(path, rows)
    Manifest("prepare", {}, {}, Counts(rows.height, rows.height), [Shard.of(path, rows.height)]).write(folder)
    return folder / "manifest.json"


def measured(answers: pl.DataFrame, partition: str, settings: GenerateSettings, runtime: Mapping[str, Any], speed: float) -> Sample:
    """The answers as a sample; `speed` is tokens a second over all of them."""
    tokens = answers["output_ids"].list.len().to_list()
    cut = (answers["finish_reason"] == "length").to_list()
    slots = runtime["requests"]["concurrency"][partition] if settings.engine == "sglang" else settings.batch
    return Sample(tokens, cut, settings.max_tokens[partition], slots, sum(tokens) / speed)
