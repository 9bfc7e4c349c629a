"""Rows per second of stage `merge` on synthetic token rows: `python -m benchmarks.merge_speed [--rows 200000] [--tokens 512]`.

The last line is JSON. Peak memory is of the whole process, which makes the rows one input file at a time.
"""

import argparse
import json
import logging
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from scripts.lib.chat.messages import Message, to_rows
from scripts.lib.chat.rows import TOKEN_SCHEMA
from scripts.lib.chat.signature import signatures
from scripts.lib.formats.tables import ROWS
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job
from scripts.lib.mixing.merge import merge

DATASETS = 4
ROWS_PER_FILE = 2048
PROMPT_WORDS = 120
TASK_PROMPTS = 500
OPTIONS = {"eval_share": 0.05, "rows_per_shard": 4096, "max_tokens": False, "near_duplicates": 0.8, "shared_words": 13}


def token_table(name: str, start: int, rows: int, tokens: int) -> pl.DataFrame:
    """`rows` rows of `tokens` random ids each, every one a group of its own."""
    generator = np.random.default_rng(start)
    names = [f"{start + i:08d}" for i in range(rows)]
    columns = {
        "id": names,
        "dataset": [name] * rows,
        "group": names,
        "prompt_hash": names,
        "input_ids": pl.Series(generator.integers(0, 50_000, (rows, tokens))).arr.to_list(),
        "loss_spans": [[{"start": tokens // 4, "end": tokens}]] * rows,
    }
    return pl.DataFrame(columns, schema=TOKEN_SCHEMA)


def datasets(root: Path, rows: int, tokens: int) -> Iterator[Path]:
    """Publish `rows` rows over four data sets; the manifests' paths."""
    size = rows // DATASETS
    for number in range(DATASETS):
        folder = root / f"d{number}"
        folder.mkdir()
        shards: list[Shard] = []
        for start in range(0, size, ROWS_PER_FILE):
            table = token_table(folder.name, number * size + start, min(ROWS_PER_FILE, size - start), tokens)
            path = folder / f"tokens-{len(shards):05d}.parquet"
            table.write_parquet(path)
            shards.append(Shard.of(path, table.height))
        Manifest("encode", {"name": folder.name}, {}, Counts(size, size), shards).write(folder)
        yield folder / "manifest.json"


def prepared(folder: Path, start: int, rows: int) -> Path:
    """Publish the prepared rows behind `rows` token rows, of random words, or of the prompts of a task; the manifest's path."""
    generator = np.random.default_rng(start + 1)
    prompts = [" ".join(map(str, generator.integers(0, 20_000, PROMPT_WORDS))) for _ in range(rows)]
    names = [f"{start + i:08d}" for i in range(rows)]
    columns = {
        "id": names,
        "group": names,
        "source_row": range(rows),
        "messages": [to_rows([Message("user", prompt), Message("assistant", "so")]) for prompt in prompts],
        "kind": ["prompts"] * rows,
        "prompt_hash": names,
        "signature": signatures(prompts),
    }
    folder.mkdir()
    path = folder / "rows-00000.parquet"
    pl.DataFrame(columns, schema={name: kind for name, kind in ROWS.items() if name in columns}).write_parquet(path)
    Manifest("prepare", {"name": folder.name.removeprefix("prepared-")}, {}, Counts(rows, rows), [Shard.of(path, rows)]).write(folder)
    return folder / "manifest.json"


def measure(rows: int, tokens: int) -> dict[str, float]:
    """Seconds, rates and peak memory of one merge."""
    with tempfile.TemporaryDirectory() as root:
        manifests = tuple(datasets(Path(root), rows, tokens))
        folder = Path(root) / "merged"
        folder.mkdir()
        size = rows // DATASETS
        asked = [prepared(Path(root) / f"prepared-d{number}", number * size, size) for number in range(DATASETS)]
        consulted = {"prepared": asked, "tasks": [prepared(Path(root) / "task", rows, TASK_PROMPTS)]}
        settings = {"merge": OPTIONS, "seed": 0, "weights": {}}
        start, processor = time.perf_counter(), time.process_time()
        merge(Job("merge", folder, {"tokens": manifests}, settings, consulted=consulted), folder)
        seconds = time.perf_counter() - start
    return {
        "rows": rows,
        "tokens_per_row": tokens,
        "seconds": round(seconds, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
        "rows_per_second": round(rows / seconds),
        "tokens_per_second": round(rows * tokens / seconds),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.rows, arguments.tokens)))
