"""Tokens a second of stage hidden against bare forward passes of its engine over the same batches, and GB/s of its shards against the disk.

python -m benchmarks.hidden_stage --target results/demo/target --merged results/demo/merged/manifest.json --device cuda \
    --dtype bfloat16 --batch-tokens 65536 --tokens-per-shard 262144 --stored fp8 --threads 8 --tokens 4000000

Bare passes and dumps (forward passes, checks, files, receipts) of all rows take turns, after one turn over the first shards that is not
counted: a GPU gives out memory for each new size of batch. Rows are repeated until there are `--tokens` of them. Then one shard and a
plain file of as many bytes are written in turns. Both times end when the disk has the bytes. The last line is JSON, with medians.
"""

import argparse
import functools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import torch

from scripts.lib.engines.decoder import final_states
from scripts.lib.engines.moving import sent
from scripts.lib.engines.opening import DTYPES
from scripts.lib.engines.transformers_engine import TransformersEngine, padded
from scripts.lib.ground.files import write_bytes
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job
from scripts.lib.states.capture import batches
from scripts.lib.states.finishing import workers, written
from scripts.lib.states.format import write_rows
from scripts.lib.states.hidden import Dump
from scripts.lib.states.marks import RECEIPTS
from scripts.lib.states.rows import ShardPlan, TokenRow
from scripts.lib.states.storing import COMPRESSIONS
from scripts.lib.states.storing import DTYPES as STORED

GIGA = 1e9
WARM = 8  # one of so many shards before the clock starts
WRITES = 3  # of a shard and of a plain file, in turns


def main() -> None:
    """Measure and print."""
    options = arguments()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        print(json.dumps(measured(options, Path(name))))


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures, of work in `folder`."""
    dump = Dump.of(job_of(options, folder), folder)
    shards = [plan.read() for plan in dump.plans]
    tokens = sum(len(row.input_ids) for rows in shards for row in rows)
    speeds = turns(dump, shards, options.device, options.repeats)
    captured = dump.writer.capture(shards[0])
    states = captured.wait()
    write = functools.partial(write_rows, rows=captured.rows, states=states, storing=dump.settings.storing, rounded=captured.rounded())
    writes = write_speeds(folder, write)
    names = ("device", "dtype", "threads", "batch_tokens", "stored", "compression")
    return {name: getattr(options, name) for name in names} | {"shards": len(shards), "tokens": tokens} | speeds | writes


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder in HF layout")
    parser.add_argument("--merged", type=Path, required=True, help="manifest of stage merge")
    parser.add_argument("--tokens", type=int, help="rows are taken and repeated until there are so many; all rows once if not given")
    parser.add_argument("--greedy", action="store_true", help="the rows are the target's own: compare them as the stage does")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--tokens-per-shard", type=int, default=32768)
    parser.add_argument("--stored", choices=STORED, default="bfloat16")
    parser.add_argument("--compression", choices=COMPRESSIONS, default="none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="turns of bare passes and dumps")
    parser.add_argument("--folder", type=Path, default=Path(), help="where shards are written")
    return parser.parse_args()


def job_of(options: argparse.Namespace, folder: Path) -> Job:
    """The job of stage hidden, on a mix of the rows that are to be measured."""
    names = ("dtype", "batch_tokens", "tokens_per_shard", "stored", "compression")
    settings: dict[str, Any] = {"hidden": {"engine": "transformers", "layers": "auto", **{name: getattr(options, name) for name in names}}}
    merged, greedy = mixed(options.merged, options.tokens, folder / "merged")
    inputs = {"merged": (merged,), "target": (options.target / "config.json",)}
    runtime = {"device": options.device, "threads": options.threads}
    return Job("hidden", folder / "out", inputs, settings | {"greedy": greedy if options.greedy else []}, runtime)


def mixed(manifest: Path, wanted: int | None, folder: Path) -> tuple[Path, list[str]]:
    """The manifest of a mix in `folder`: the rows of that behind `manifest`, repeated under new names to `wanted` tokens. Its datasets."""
    folder.mkdir()
    rows = pl.concat([pl.read_parquet(path) for path in sorted(manifest.parent.glob("train-*.parquet"))])
    once = int(rows["input_ids"].list.len().sum())
    times = 1 if wanted is None else -(-wanted // once)
    copies = [rows.with_columns(pl.format("{}-{}", pl.col("id"), pl.lit(number)).alias("id")) for number in range(times)]
    table = pl.concat(copies).with_row_index("place").filter(pl.col("input_ids").list.len().cum_sum() <= (wanted or once)).drop("place")
    table.write_parquet(folder / "train-00000.parquet")
    shard = Shard.of(folder / "train-00000.parquet", table.height)
    Manifest("merge", {}, {}, Counts(table.height, table.height), [shard]).write(folder)
    return folder / "manifest.json", table["dataset"].unique().to_list()


def turns(dump: Dump, shards: Sequence[Sequence[TokenRow]], device: str, repeats: int) -> dict[str, float]:
    """Tokens a second of bare passes and of dumps of all `shards`, and GB/s that a dump writes: medians of `repeats` turns."""
    warm = max(len(shards) // WARM, 1)
    prefill(dump, shards[:warm])
    dumped(dump, dump.plans[:warm], device)
    seconds: dict[str, list[float]] = {"prefill": [], "dump": []}
    size = 0
    for _ in range(repeats):
        seconds["prefill"].append(timed(lambda: prefill(dump, shards)))
        taken, size = dumped(dump, dump.plans, device)
        seconds["dump"].append(taken)
        print({name: round(values[-1], 2) for name, values in seconds.items()}, flush=True)
    tokens = sum(len(row.input_ids) for rows in shards for row in rows)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    shares = [plain / dump for plain, dump in zip(seconds["prefill"], seconds["dump"], strict=True)]
    speeds = {f"{name}_tokens_per_second": round(tokens / value, 1) for name, value in middle.items()}
    return speeds | {"dump_of_prefill": round(statistics.median(shares), 3), "dump_gb_per_second": round(size / middle["dump"] / GIGA, 3)}


@torch.inference_mode()
def prefill(dump: Dump, shards: Sequence[Sequence[TokenRow]]) -> None:
    """Forward passes over the batches of `shards`, and nothing else."""
    engine = dump.writer.engine()
    assert isinstance(engine, TransformersEngine)
    for rows in shards:
        for batch in batches([row.input_ids for row in rows], dump.writer.batching):
            final_states(engine.model, sent(padded([rows[index].input_ids for index in batch]), engine.device), None)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()


def dumped(dump: Dump, plans: Sequence[ShardPlan], device: str) -> tuple[float, int]:
    """Make the shards `plans` as the stage does: the seconds, and their bytes. They are deleted afterwards."""
    folder = dump.writer.folder / "dumped"
    (folder / RECEIPTS).mkdir(parents=True)
    start = time.perf_counter()
    receipts = [receipt for _, receipt in written(replace(dump.writer, folder=folder), plans, workers(device))]
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return seconds, sum(receipt.shard.bytes for receipt in receipts if receipt.shard)


def write_speeds(folder: Path, write: Callable[[Path], str]) -> dict[str, float]:
    """GB/s of a shard that `write` makes, and of a plain file of as many bytes, both until the disk has them: medians of turns."""
    first = folder / "first"
    write(first)
    size = first.stat().st_size
    first.unlink()
    data = (os.urandom(1 << 20) * (size // (1 << 20) + 1))[:size]
    seconds: dict[str, list[float]] = {"write": [], "disk": []}
    for number in range(WRITES):
        shard, plain = folder / f"shard-{number}", folder / f"plain-{number}"
        seconds["write"].append(timed(functools.partial(write, shard)))
        seconds["disk"].append(timed(functools.partial(write_bytes, plain, data)))
        shard.unlink()
        plain.unlink()
    speeds = {name: size / statistics.median(values) / GIGA for name, values in seconds.items()}
    figures = {f"{name}_gb_per_second": round(speed, 3) for name, speed in speeds.items()}
    return figures | {"write_of_disk": round(speeds["write"] / speeds["disk"], 3)}


def timed(action: Callable[[], object]) -> float:
    """Seconds of `action`."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
