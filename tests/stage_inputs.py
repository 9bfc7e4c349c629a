"""Published folders that the stages generate and hidden read, and their command lines, on the tiny target."""

import contextlib
import errno
import json
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from scripts.lib.chat.rows import TOKEN_SCHEMA
from scripts.lib.formats.tables import ROWS
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job
from scripts.lib.states import writer
from tests.tiny import save_tiny_target

REQUESTS: dict[str, Any] = {
    "concurrency": {"short": 4, "long": 2},
    "timeout": 5.0,
    "patience": 5.0,
    "gather": 0.2,
    "retries": 2,
    "window": 4,
    "stop_at": {"truncated": 1.0, "empty": 1.0, "failed": 1.0},
}
RUNTIME = {"device": "cpu", "threads": 1}
GENERATE = {
    "engine": "transformers",
    "dtype": "float32",
    "batch": 4,
    "turns": "first",
    "temperature": 0.0,
    "max_tokens": {"short": 12, "long": 24},
    "truncated": "keep",
}
HIDDEN = {"engine": "transformers", "dtype": "float32", "batch_tokens": 96, "tokens_per_shard": 150, "layers": "auto"}


def publish_target(folder: Path) -> Path:
    """A tiny target with its manifest; returns the manifest's path."""
    save_tiny_target(folder)
    Manifest("target", {}, {}, Counts(0, 0)).write(folder)
    return folder / "manifest.json"


def user(*texts: str) -> list[dict[str, Any]]:
    """Messages of users only, each still without an answer before the next."""
    return [message("user", text) for text in texts]


def message(role: str, content: str | None) -> dict[str, Any]:
    """One message of a `messages` column."""
    return {"role": role, "content": content, "reasoning_content": None, "tool_calls": None}


def prepared_row(name: str, messages: Sequence[Mapping[str, Any]], **values: Any) -> dict[str, Any]:
    """A prepared row in the real schema."""
    row = {"id": name, "group": name, "source_row": 0, "messages": list(messages), "tools": None, "kind": "prompts", "partition": "short"}
    return row | {"prompt_tokens": 10, "prompt_hash": "0" * 16} | values


def publish_prepared(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A published folder of stage prepare; returns its manifest's path."""
    folder.mkdir(parents=True)
    return publish(folder, "prepare", {"rows-00000.parquet": pl.DataFrame(rows, schema=dict(ROWS), orient="row")})


def token_row(name: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """A token row in the real schema."""
    places = [{"start": start, "end": end} for start, end in spans]
    return {"id": name, "dataset": "toy", "group": name, "prompt_hash": "0" * 16, "input_ids": list(ids), "loss_spans": places}


def publish_merged(folder: Path, train: Sequence[Mapping[str, Any]], evaluation: Sequence[Mapping[str, Any]]) -> Path:
    """A published folder of stage merge, the train rows in two files; returns its manifest's path."""
    folder.mkdir(parents=True)
    half = (len(train) + 1) // 2
    parts = {"train-00000.parquet": train[:half], "train-00001.parquet": train[half:], "eval-00000.parquet": evaluation}
    return publish(folder, "merge", {name: pl.DataFrame(rows, schema=TOKEN_SCHEMA, orient="row") for name, rows in parts.items()})


def publish(folder: Path, stage: str, tables: Mapping[str, pl.DataFrame]) -> Path:
    """Write tables and manifest."""
    shards = []
    for name, table in tables.items():
        table.write_parquet(folder / name)
        shards.append(Shard.of(folder / name, table.height))
    rows = sum(table.height for table in tables.values())
    Manifest(stage, {}, {}, Counts(rows, rows), shards).write(folder)
    return folder / "manifest.json"


def some_token_rows(count: int, prefix: str = "r") -> list[dict[str, Any]]:
    """Token rows of 9 to 40 tokens, every third with two spans."""
    rows = []
    for number in range(count):
        length = 9 + number * 7 % 32
        ids = [3 + (number * 31 + place * 17) % 250 for place in range(length)]
        spans = [(2, 4), (6, length)] if number % 3 == 0 else [(4, length)]
        rows.append(token_row(f"{prefix}{number:02d}", ids, spans))
    return rows


def generate_job(folder: Path, prepared: Path, target: Path, name: str = "out", **options: Any) -> Job:
    """A job of stage generate that publishes `folder`/`name`."""
    settings = {"generate": GENERATE | options, "name": "toy", "seed": 7}
    return Job("generate", folder / name, {"prepared": (prepared,), "target": (target,)}, settings, RUNTIME, folder / "work")


def hidden_job(folder: Path, merged: Path, target: Path, name: str = "out", **options: Any) -> Job:
    """A job of stage hidden that publishes `folder`/`name`."""
    return Job("hidden", folder / name, {"merged": (merged,), "target": (target,)}, {"hidden": HIDDEN | options}, RUNTIME, folder / "work")


@contextlib.contextmanager
def disk_full_at(name: str) -> Iterator[None]:
    """Inside, the disk has no room for the shard `name` of hidden states."""
    write = writer.write_rows

    def full(path: Path, *rest: Any) -> str:
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "write_rows", full)
        yield


def command(job: Job) -> list[str]:
    """Module and arguments that run `job`."""
    inputs = [word for name, paths in job.inputs.items() for word in (f"--{name}", *map(str, paths))]
    outputs = ["--output", str(job.output / "manifest.json"), "--work", str(job.work)]
    settings = ["--settings", json.dumps(job.settings), "--runtime", json.dumps(job.runtime)]
    return [f"scripts.{job.stage}", *inputs, *outputs, *settings]


def start(job: Job, log: Path, file_limit: int = -1) -> ForkServerProcess:
    """`python -m scripts.<stage>` for `job` as a process group of its own, forked from a server that has torch loaded already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.lib.generation.responses", "scripts.lib.generation.served", "scripts.lib.states.hidden"])
    process = context.Process(target=stage_process, args=(command(job), log, file_limit))
    process.start()
    return process


def stage_process(words: Sequence[str], log: Path, file_limit: int) -> None:
    """Become the command `words`: a session of its own, stderr in `log`, no file longer than `file_limit` bytes."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__")


def finish(job: Job, log: Path, file_limit: int = -1) -> tuple[int | None, str]:
    """Run `job` to its end; exit code and log."""
    process = start(job, log, file_limit)
    process.join()
    return process.exitcode, log.read_text()


def kill_when(job: Job, count: int, pattern: str, delay: float, log: Path) -> None:
    """Start `job` and kill its process group `delay` seconds after `count` lines or files are below its work folder."""
    process = start(job, log)
    while process.is_alive() and progress_of(job, pattern) < count:
        time.sleep(0.001)
    time.sleep(delay)
    with contextlib.suppress(ProcessLookupError):  # it may have ended, or has not made its group yet
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()


def progress_of(job: Job, pattern: str) -> int:
    """Lines in the files that match `pattern` below the work folder of `job`'s stage; a binary file counts as one."""
    files = [path for path in job.work.glob(f"{job.stage}/*/{pattern}") if path.is_file()]
    return sum(path.read_bytes().count(b"\n") if path.suffix == ".jsonl" else 1 for path in files)


def data_files(folder: Path) -> dict[str, bytes]:
    """Content by name of a published folder, without what time decides."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "cost.json"}
