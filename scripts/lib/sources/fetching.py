"""Stage fetch: the pinned bytes of one dataset or benchmark task."""

import shutil
from collections.abc import Callable
from pathlib import Path

from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job, Result
from scripts.lib.sources.generators import fetch_generator
from scripts.lib.sources.hub import fetch_hub
from scripts.lib.sources.local import fetch_path
from scripts.lib.sources.settings import Fetched, SourceSettings
from scripts.lib.sources.wheels import fetch_wheel

FETCHERS: dict[str, Callable[[SourceSettings, Path], Fetched]] = {
    "hub": fetch_hub,
    "path": fetch_path,
    "wheel": fetch_wheel,
    "generator": fetch_generator,
}


def fetch(job: Job, folder: Path) -> Result:
    """Fill `folder`/files. The manifest counts files: records are counted where they are read."""
    settings = SourceSettings.of(job.settings)
    shutil.rmtree(folder / "files", ignore_errors=True)
    fetched = FETCHERS[settings.address.kind](settings, folder)
    shutil.rmtree(folder / "files" / ".cache", ignore_errors=True)
    shards = [Shard.of(path, rows, folder=folder) for path, rows in sorted(fetched.files.items())]
    facts = {
        "source": settings.text,
        "licence": settings.licence,
        "unit": "files",
        "bytes": sum(shard.bytes for shard in shards),
        **fetched.facts,
    }
    counts = Counts(rows_in=len(shards), rows_out=len(shards))
    return Result(Manifest("fetch", job.settings, job.input_digests(), counts, shards, facts))
