"""Rows per second from raw files to merged token shards: `python benchmarks/prepare.py [--rows 1100000] [--vs specforge]`.

The real stages run as in a run of configs/kimi-k2.5.yaml on made-up files of its ten datasets, `--jobs` at a time: fetch (a
copy), prepare, encode, merge. No target answers here. In its place the source's own answers are encoded, as those of native
datasets are, so that as many rows are rendered, tokenised and given loss spans as in the real run; prompts that have no
answer in the source count as rows that `encode` rejects.

`--vs specforge` then times SpecForge 0.2.0 (`benchmarks/specforge_rows.py`) on the same machine, with as many processes and
the same tokenizer, on two shares of the same rows: of the raw rows, since it has no sampling but the first N, and of the
kept rows, for tokenising alone. The last line is JSON; memory is the largest sum over processes running at one time.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))  # also for `python benchmarks/prepare.py`

from benchmarks.specforge_rows import Comparison, compare  # noqa: E402
from scripts.lib.fixtures.making import FULL_SIZE, make_fixtures, shares  # noqa: E402
from scripts.lib.fixtures.target import make_target  # noqa: E402
from scripts.lib.ground.manifest import read_manifest  # noqa: E402

CONFIGS = ("config.yaml", "configs/kimi-k2.5.yaml", "configs/kimi-k2.5-fixtures.yaml")
FETCHED = ("source", "revision", "subset", "split", "members", "exclude", "generator", "licence")
PROMPTS = {"kind": "prompts", "partition": "short"}  # what a benchmark task is, where it is prepared like a dataset
SECONDS_BETWEEN_LOOKS = 0.1


@dataclass
class Meter:
    """Seconds and peak memory of each stage; the memory is that of all its processes together."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, float] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)

    def watch(self, stage: str, done: threading.Event) -> None:
        """Note the largest memory of the running processes until `done`."""
        while not done.wait(SECONDS_BETWEEN_LOOKS):
            total = sum(resident_mb(pid) for pid in list(self.running))
            self.peak_mb[stage] = max(self.peak_mb.get(stage, 0.0), total)

    def run(self, stage: str, commands: Sequence[Sequence[str]], jobs: int) -> None:
        """Run the commands of one stage, `jobs` at a time."""
        done, start = threading.Event(), time.perf_counter()
        watcher = threading.Thread(target=self.watch, args=(stage, done))
        watcher.start()
        try:
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(self.execute, commands))
        finally:
            done.set()
            watcher.join()
        self.seconds[stage] = round(time.perf_counter() - start, 2)
        logging.info("%s: %.1f s, %.0f MB", stage, self.seconds[stage], self.peak_mb.get(stage, 0.0))

    def execute(self, command: Sequence[str]) -> None:
        """One process, counted while it runs; RuntimeError with its last words when it fails."""
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(REPO)}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            self.running.add(process.pid)
            _, errors = process.communicate()
            self.running.discard(process.pid)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)[:200]}\n{errors[-2000:]}")


def resident_mb(pid: int) -> float:
    """Memory that process `pid` holds now; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def flagship(rows: int, fixtures: Path) -> dict[str, Any]:
    """The merged config of the ten datasets on the `rows` raw rows below `fixtures`, with samples in proportion."""
    config: dict[str, Any] = {}
    for name in CONFIGS:
        config = overlaid(config, yaml.safe_load((REPO / name).read_text()))
    samples = scaled_samples(rows)
    # Every defect comes at least once, which at a small size is a larger share than a dataset is allowed.
    loose = {"max_rejected": 1.0} if rows < FULL_SIZE else {}
    datasets = {name: dataset | {"samples": samples[name]} | loose for name, dataset in config["datasets"].items() if dataset}
    config["datasets"] = datasets
    config["benchmark"]["tasks"] = {name: PROMPTS | task for name, task in config["benchmark"]["tasks"].items() if task}
    for entry in [*config["datasets"].values(), *config["benchmark"]["tasks"].values(), config["target"]]:
        entry["source"] = entry["source"].replace("path:fixtures/", f"path:{fixtures}/")
    return config


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` on it, as Snakemake lays one config file over another."""
    return {**base, **{key: overlaid(base.get(key) or {}, value) if isinstance(value, dict) else value for key, value in over.items()}}


def scaled_samples(rows: int) -> dict[str, int]:
    """The samples of each dataset, in proportion to its raw rows at this size. Both round down."""
    real = yaml.safe_load((REPO / CONFIGS[1]).read_text())["datasets"]
    full, here = shares(FULL_SIZE), shares(rows)
    return {name: max(1, real[name]["samples"] * here[name] // full[name] - (rows < FULL_SIZE) * 8) for name in full}


@dataclass(frozen=True)
class Bench:
    """Where things lie, and the config."""

    results: Path
    config: Mapping[str, Any]

    def manifest(self, folder: str, name: str = "") -> str:
        """The manifest of a stage's folder."""
        return str(self.results / folder / name / "manifest.json")

    def stage(self, stage: str, output: str, settings: Mapping[str, Any], **inputs: Sequence[str]) -> list[str]:
        """The command line of one job, as the rules write it."""
        given = [argument for flag, paths in inputs.items() for argument in (f"--{flag}", *paths)]
        work = str(self.results / "work")
        tail = ["--output", output, "--settings", json.dumps(settings), "--work", work]
        return [sys.executable, "-m", f"scripts.{stage}", *given, *tail]

    def stages(self) -> Iterator[tuple[str, list[list[str]]]]:
        """Each stage with its commands, in order."""
        config, names, tasks, target = self.config, sorted(self.config["datasets"]), sorted(self.tasks), self.manifest("target")
        yield "target", [self.stage("target", target, {"target": config["target"]})]
        yield "fetch", [self.stage("fetch", self.manifest("raw", name), self.fetch_settings(name)) for name in [*names, *tasks]]
        yield "prepare", [self.prepare(name, target) for name in [*names, *tasks]]
        yield "encode", [self.encode(name, target) for name in names]
        inputs = {
            "tokens": [self.manifest("tokens", name) for name in names],
            "prepared": [self.manifest("prepared", name) for name in names],
            "tasks": [self.manifest("prepared", name) for name in tasks],
        }
        settings = {"merge": config["merge"], "seed": config["seed"], "weights": {}}
        yield "merge", [self.stage("merge", self.manifest("merged"), settings, **inputs)]

    def prepare(self, name: str, target: str) -> list[str]:
        """Prepare one dataset or task."""
        rest = {key: value for key, value in self.source(name).items() if key not in (*FETCHED, "max_tokens")}
        settings = {"dataset": rest, "name": name, "seed": self.config["seed"]}
        return self.stage("prepare", self.manifest("prepared", name), settings, raw=[self.manifest("raw", name)], target=[target])

    def encode(self, name: str, target: str) -> list[str]:
        """Encode the answers that the rows of one dataset hold already."""
        settings = {"encode": self.config["encode"], "name": name, "kind": "native"}
        return self.stage("encode", self.manifest("tokens", name), settings, rows=[self.manifest("prepared", name)], target=[target])

    @property
    def tasks(self) -> Mapping[str, Any]:
        """The benchmark tasks, which the mix must not hold."""
        tasks: Mapping[str, Any] = self.config["benchmark"]["tasks"]
        return tasks

    def source(self, name: str) -> Mapping[str, Any]:
        """A dataset or a task."""
        entry: Mapping[str, Any] = {**self.config["datasets"], **self.tasks}[name]
        return entry

    def fetch_settings(self, name: str) -> dict[str, Any]:
        """Where the bytes of a dataset or a task come from."""
        dataset = self.source(name)
        return {"source": {key: dataset[key] for key in FETCHED if key in dataset}, "name": name, "seed": 0}


def fixtures_in(folder: Path, rows: int) -> Path:
    """The files for `rows` rows below `folder`, made unless they are there."""
    place = folder / f"fixtures-{rows}"
    if not (place / "done").exists():
        make_target(place / "target", 7)
        make_fixtures(place, rows, 7)
        (place / "done").touch()
    return place


def measure(folder: Path, rows: int, jobs: int) -> tuple[Bench, dict[str, Any]]:
    """Run all stages on `rows` raw rows; seconds and memory of each, and what came out."""
    fixtures = fixtures_in(folder, rows)
    results = folder / f"results-{rows}"
    shutil.rmtree(results, ignore_errors=True)
    bench, meter = Bench(results, flagship(rows, fixtures)), Meter()
    for stage, commands in bench.stages():
        meter.run(stage, commands, jobs)
    prepared = [read_manifest(Path(bench.manifest("prepared", name)), "prepare").counts for name in bench.config["datasets"]]
    tokens = [read_manifest(Path(bench.manifest("tokens", name)), "encode") for name in bench.config["datasets"]]
    merged = read_manifest(Path(bench.manifest("merged")), "merge")
    seconds = sum(value for stage, value in meter.seconds.items() if stage != "target")
    raw = sum(counts.rows_in for counts in prepared)
    return bench, {
        "rows": raw,
        "kept": sum(counts.rows_out for counts in prepared),
        "tokens": sum(manifest.facts["tokens"] for manifest in tokens),
        "merged_rows": merged.counts.rows_out,
        "rows_per_second": round(raw / seconds),
        "seconds": round(seconds, 1),
        "peak_mb": round(max(meter.peak_mb.values())),
        "stage_seconds": meter.seconds,
        "stage_peak_mb": {stage: round(peak) for stage, peak in meter.peak_mb.items()},
        "jobs": jobs,
    }


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=FULL_SIZE)
    parser.add_argument("--folder", type=Path, default=Path("results/bench-prepare"), help="fixtures are kept here, results replaced")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--vs", choices=["specforge"])
    parser.add_argument("--vs-rows", type=int, default=10_000, help="rows of each share that the other side gets")
    parser.add_argument("--vs-sources", type=Path, help="checkout of SpecForge: its scripts/prepare_data.py is not in its wheel")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    bench, result = measure(arguments.folder.resolve(), arguments.rows, arguments.jobs)
    if arguments.vs:
        result |= compare(Comparison(bench.results, arguments.folder, arguments.vs_rows, arguments.vs_sources), bench.config, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
