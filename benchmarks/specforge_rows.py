"""SpecForge 0.2.0's own code on shares of the rows that `benchmarks/prepare.py` has prepared.

Its wheel holds the tokenisation (`specforge.data.preprocessing.build_eagle3_dataset`). Its `scripts/prepare_data.py` stands
in its repository only, and knows four of the ten datasets: it is timed where a checkout is given. Of the other datasets, and
without a checkout of all, it gets the rows as conversations for nothing.
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.formats.conversation import read_conversation
from scripts.lib.formats.preparing import settled
from scripts.lib.formats.record import RejectedError
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.sources.records import read_records

VERSION = "0.2.0"
TEMPLATE = "kimi-k2-instruct"
PRESETS = {
    "ultrachat": "process_ultrachat_row",
    "sharegpt": "process_sharegpt_row",
    "opencode_instruct": "process_opencodeinstruct_row",
    "magicoder": "process_magicoder_evol_instruct_row",
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Our results, a folder for the other side's files, how many rows it gets, and a checkout of its repository if there is one."""

    results: Path
    folder: Path
    rows: int
    sources: Path | None


def compare(given: Comparison, config: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Time both shares in a process of its own; the ratios are our rows a second over its rows a second.

    `ratio` is of whole pipelines on raw rows, `ratio_tokenising` of our `encode` and its tokenisation on kept rows.
    """
    results, folder, names = given.results, given.folder, sorted(config["datasets"])
    wheel = unpacked(folder / "specforge")
    base = [sys.executable, "-m", "benchmarks.specforge_rows", "--target", str(results / "target"), "--jobs", str(ours["jobs"])]
    base += ["--max-length", str(config["encode"]["max_length"]), *(["--sources", str(given.sources)] if given.sources else [])]
    shares = {
        "raw": raw_share(results, names, given.rows / ours["rows"]),
        "kept": kept_share(results, names, given.rows / ours["kept"]),
    }
    figures: dict[str, Any] = {}
    for name, share in shares.items():
        path = folder / f"specforge-{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in share))
        environment = {**os.environ, "PYTHONPATH": f"{wheel}{os.pathsep}{Path(__file__).parents[1]}"}
        cache = folder / "specforge-cache"  # its key is the file's path: what lies there may be of other rows
        shutil.rmtree(cache, ignore_errors=True)
        command = [*base, "--share", str(path), "--cache", str(cache)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"SpecForge failed on the {name} rows:\n{done.stderr[-3000:]}")
        figures[f"specforge_{name}"] = json.loads(done.stdout.splitlines()[-1])
    theirs_raw, theirs_kept = (figures[f"specforge_{name}"]["rows_per_second"] for name in shares)
    ours_kept = ours["kept"] / ours["stage_seconds"]["encode"]
    return figures | {
        "ratio": round(ours["rows_per_second"] / theirs_raw, 2),
        "ratio_tokenising": round(ours_kept / theirs_kept, 2),
        "tokenising_rows_per_second": round(ours_kept, 1),
    }


def unpacked(folder: Path) -> Path:
    """The wheel's content, downloaded with pip without what it depends on."""
    if not (folder / "specforge").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), f"specforge=={VERSION}"]
        subprocess.run(pip, check=True)
        (wheel,) = folder.glob("specforge-*.whl")
        subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(folder)], check=True)
    return folder.resolve()


def raw_share(results: Path, names: Sequence[str], share: float) -> Iterator[Row]:
    """A share of the raw rows of each dataset: the first, which are as good as any in made-up files."""
    for name in names:
        path = results / "prepared" / name / "manifest.json"
        manifest = read_manifest(path, "prepare")
        raw = results / "raw" / name
        files = [raw / shard.name for shard in read_manifest(raw / "manifest.json", "fetch").shards]
        settings = DatasetSettings.of(settled(manifest.settings, files))
        records = (record for file in files for record in read_records(file, lambda _: None))
        for number, record in enumerate(islice(records, max(1, int(manifest.counts.rows_in * share)))):
            yield {
                "dataset": name,
                "id": f"{name}-{number}",
                "conversations": conversation(record, settings),
                "raw": raw_part(name, record),
            }


def conversation(record: Row, settings: DatasetSettings) -> list[Row]:
    """The record as role and content; empty, which SpecForge skips, where it is no conversation."""
    try:
        messages = read_conversation(record, settings).messages
    except RejectedError:
        return []
    return [{"role": message.role, "content": message.content or ""} for message in messages]


def raw_part(name: str, record: Row) -> Row | None:
    """The raw record of a dataset that `prepare_data.py` knows."""
    return record if name in PRESETS else None


def kept_share(results: Path, names: Sequence[str], share: float) -> Iterator[Row]:
    """A seeded share of the kept rows of each dataset."""
    for name in names:
        folder = results / "prepared" / name
        manifest = read_manifest(folder / "manifest.json", "prepare")
        frame = pl.concat([pl.read_parquet(folder / shard.name, columns=["id", "messages"]) for shard in manifest.shards])
        count = max(1, int(frame.height * share))
        for place in sorted(random.Random(name).sample(range(frame.height), min(count, frame.height))):
            row_id, messages = frame.row(place)
            turns = [{"role": message["role"], "content": message["content"] or ""} for message in messages]
            yield {"dataset": name, "id": row_id, "conversations": turns, "raw": None}


def main() -> None:
    """What runs with SpecForge on its path: prepare_data's conversion where it can be had, then its tokenisation."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--target", "--share", "--cache", "--sources"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--max-length", type=int)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.share.read_text().splitlines()]
    converted, preparing = convert(rows, arguments.sources) if arguments.sources else (0, 0.0)
    lines = arguments.share.with_suffix(".conversations.jsonl")
    lines.write_text("".join(json.dumps({"id": row["id"], "conversations": row["conversations"]}) + "\n" for row in rows))
    tokenised, tokens, tokenising = tokenise(lines, arguments)
    figures: dict[str, float] = {"rows": len(rows), "rows_converted": converted, "rows_tokenised": tokenised, "tokens": tokens}
    seconds = preparing + tokenising
    figures |= {"seconds": round(seconds, 2), "preparing_seconds": round(preparing, 2), "rows_per_second": round(len(rows) / seconds, 1)}
    print(json.dumps(figures))


def convert(rows: list[Row], sources: Path) -> tuple[int, float]:
    """Rows that `prepare_data.py` of a checkout has converted and written as it does, and the seconds."""
    spec = importlib.util.spec_from_file_location("prepare_data", sources / "scripts/prepare_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare_data"] = module
    spec.loader.exec_module(module)
    done, seconds = 0, 0.0
    for name, processor in PRESETS.items():
        records = [row["raw"] for row in rows if row["dataset"] == name and usable(name, row["raw"])]
        start = time.perf_counter()
        module._write_split(records, Path(os.devnull), getattr(module, processor), name)
        seconds += time.perf_counter() - start
        done += len(records)
    return done, seconds


def usable(name: str, record: Row | None) -> bool:
    """Whether `prepare_data.py` gets through the record: a system turn of UltraChat ends its run."""
    return record is not None and (name != "ultrachat" or all(turn["role"] != "system" for turn in record["messages"]))


def tokenise(lines: Path, arguments: argparse.Namespace) -> tuple[int, int, float]:
    """Rows and tokens that SpecForge makes of the conversations, and its seconds, reading the file included."""
    from datasets import Dataset
    from specforge.data.preprocessing import build_eagle3_dataset
    from specforge.utils import safe_conversations_generator
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    start = time.perf_counter()
    dataset = Dataset.from_generator(safe_conversations_generator, gen_kwargs={"file_path": str(lines)}, cache_dir=str(arguments.cache))
    built = build_eagle3_dataset(dataset, tokenizer, TEMPLATE, max_length=arguments.max_length, num_proc=arguments.jobs)
    seconds = time.perf_counter() - start
    return len(built), sum(len(row[0]) for row in built.with_format(None)["input_ids"]), seconds


if __name__ == "__main__":
    main()
