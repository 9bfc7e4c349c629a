"""What the client of stage generate costs: answers a second and peak memory, against a stub that answers at once.

`python benchmarks/client.py [--rows N]`. The rows come from a Parquet file of prepared rows and the answers go to the journal, as in the
stage; prompts are ready-made ids, as rendering them is the tokenizer's cost and takes place at the pace of a real server.
The stub is a process of its own. The last line is JSON.
"""

import argparse
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.generation.client import Client
from scripts.lib.generation.conversation import Conversation
from scripts.lib.generation.driver import Driver, Prompts
from scripts.lib.generation.intake import Intake, Opened
from scripts.lib.generation.outcome import Outcome
from scripts.lib.generation.policy import Policy
from scripts.lib.generation.segments import Segments
from scripts.lib.generation.settings import GenerateSettings
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.watching.observed import Plan
from scripts.lib.watching.watcher import Watcher
from tests.tiny import save_tiny_target

LONGEST_PROMPT, VOCABULARY = 200, 250
MESSAGE = {"role": "user", "content": "How much does a client cost?", "reasoning_content": None, "tool_calls": None}
GENERATE: dict[str, Any] = {
    "engine": "sglang",
    "dtype": "bfloat16",
    "batch": 1,
    "turns": "first",
    "temperature": 0.0,
    "max_tokens": {"short": 1024, "long": 1024},
    "truncated": "keep",
}
REQUESTS: dict[str, Any] = {
    "concurrency": {"short": 150, "long": 32},
    "timeout": 60,
    "patience": 60,
    "retries": 4,
    "window": 8192,
    "gather": 0.5,
    "stop_at": {"truncated": 1.0, "empty": 0.0, "failed": 0.0},
}


def prepared(folder: Path, rows: int) -> Path:
    """`rows` prepared rows with what the client reads of them; the manifest's path."""
    lengths = np.random.default_rng(0).integers(9, LONGEST_PROMPT, rows)
    names = pl.select(id=pl.int_range(rows).cast(pl.String))["id"]
    constant = {"tools": None, "partition": "short", "messages": [MESSAGE]}
    table = pl.DataFrame({"id": names, "group": names, "prompt_hash": names, "prompt_tokens": lengths})
    columns = [
        pl.lit(pl.Series([value], dtype=pl.String if value is None else None)).first().alias(name) for name, value in constant.items()
    ]
    path = folder / "rows-00000.parquet"
    table.with_columns(columns).write_parquet(path, row_group_size=8192)
    Manifest("prepare", {}, {}, Counts(rows, rows), [Shard.of(path, rows)]).write(folder)
    return folder / "manifest.json"


class Memory:
    """Passes windows on and notes the peak of memory when a tenth of the rows has been read."""

    def __init__(self, windows: Iterator[list[Opened]], rows: int) -> None:
        self.windows, self.tenth = windows, rows / 10
        self.read = 0
        self.peak_at_tenth = 0.0

    def __iter__(self) -> Iterator[list[Opened]]:
        return self

    def __next__(self) -> list[Opened]:
        window = next(self.windows)
        self.read += len(window)
        if self.read <= self.tenth or not self.peak_at_tenth:
            self.peak_at_tenth = peak_mb()
        return window


def peak_mb() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def measure(folder: Path, url: str, rows: int) -> dict[str, float]:
    """Ask for all rows."""
    settings = GenerateSettings.of({"generate": GENERATE, "name": "benchmark", "seed": 1})
    policy = Policy.of({"requests": REQUESTS})
    template = ChatTemplate.load(save_tiny_target(folder / "target"))
    intake = Intake(prepared(folder, rows), "first", policy.window)
    segments = Segments(folder / "partial")
    index = segments.index()
    ids = list(range(3, VOCABULARY))

    def render(conversation: Conversation) -> list[int]:
        return ids[: conversation.prompt_tokens]

    client = await Client.connect([url], template, policy, lambda: None)
    outcome = Outcome(rows, policy.stop_at)
    classes = intake.classes()
    watcher = Watcher(folder, "benchmark", Plan(classes, 0, GENERATE["max_tokens"]["short"], REQUESTS["concurrency"]["short"]))
    driver = Driver(settings, policy, Prompts(render, template, 4096), client, segments, outcome, watcher)
    windows = Memory(intake.windows(segments, index), rows)
    start, processor = time.perf_counter(), time.process_time()
    await driver.run(windows)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    assert outcome.answers.total() == rows
    return {
        "responses_per_second": round(rows / seconds, 1),
        "peak_mb": round(peak_mb(), 1),
        "peak_mb_at_one_tenth": round(windows.peak_at_tenth, 1),
        "cpu_microseconds_per_response": round(processor / rows * 1e6, 1),
        "rows": rows,
    }


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stub = subprocess.Popen([sys.executable, Path(__file__).with_name("stub.py"), str(port)])
    wait_for(port)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        figures = uvloop.run(measure(Path(folder), f"http://127.0.0.1:{port}", rows))
    stub.kill()
    print(json.dumps(figures))


def wait_for(port: int) -> None:
    """Return when the stub listens."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.05)


if __name__ == "__main__":
    main()
