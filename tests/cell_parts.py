"""What the benchmark stage reads, on disk: a tiny target, a drafter, a prepared task and a mix."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch

from scripts.lib.chat.messages import Message, to_rows
from scripts.lib.chat.rows import TOKEN_SCHEMA
from scripts.lib.eagle3.export import save_drafter
from scripts.lib.engines.transformers_engine import load_target
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job
from tests.scripted_drafter import random_drafter
from tests.tiny import save_tiny_target

# What the manifest of a target says of where it comes from.
TARGET = {"source": "hub:made/up", "revision": "0123abc"}


def write_manifest(folder: Path, stage: str, rows: int = 0, shards: Sequence[Shard] = (), facts: Mapping[str, Any] | None = None) -> Path:
    """A manifest of `rows` rows in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    Manifest(stage, {}, {}, Counts(rows, rows), shards, facts or {}).write(folder)
    return folder / "manifest.json"


def prompt_row(number: int, turns: Sequence[str] | None = None) -> dict[str, Any]:
    """A prepared row with `turns` of the user, each waiting for its answer."""
    users = turns or [f"Say {number} times hello."]
    messages = [message for text in users for message in (Message("user", text), Message("assistant"))]
    return {
        "id": f"row{number}",
        "messages": to_rows(messages),
        "tools": None,
        "prompt_hash": f"{hash_of(users[0]):016x}",
    }


def hash_of(text: str) -> int:
    """A stable number for `text`."""
    return sum(ord(letter) * (index + 1) for index, letter in enumerate(text))


def write_task(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Prepared rows of a task."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows-00000.parquet"
    pl.DataFrame(list(rows), schema_overrides={"tools": pl.String}).write_parquet(path)
    return write_manifest(folder, "prepare", len(rows), [Shard.of(path, len(rows))])


def write_mix(folder: Path, train: Sequence[str], held_out: Sequence[str] = ()) -> Path:
    """A mix whose rows have the given prompt hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for name, hashes in (("train-00000.parquet", train), ("eval-00000.parquet", held_out)):
        rows = [
            {"id": digest, "dataset": "d", "group": digest, "prompt_hash": digest, "input_ids": [1], "loss_spans": []} for digest in hashes
        ]
        pl.DataFrame(rows, schema=TOKEN_SCHEMA).write_parquet(folder / name)
        shards.append(Shard.of(folder / name, len(rows)))
    return write_manifest(folder, "merge", len(train) + len(held_out), shards)


def write_cell_inputs(root: Path, rows: Sequence[Mapping[str, Any]], trained: Sequence[str] = ()) -> dict[str, tuple[Path, ...]]:
    """Every input of the stage under `root`; the drafter is untrained."""
    target = save_tiny_target(root / "target")
    drafter = root / "drafters/eagle3"
    drafter.mkdir(parents=True)
    save_drafter(random_drafter(load_target(target, torch.float32, "cpu")), drafter)
    return {
        "drafter": (write_manifest(drafter, "train"),),
        "target": (write_manifest(target, "target", facts=TARGET),),
        "prepared": (write_task(root / "prepared/task", rows),),
        "merged": (write_mix(root / "merged", trained),),
    }


def cell_job(root: Path, inputs: Mapping[str, Sequence[Path]], dtype: str = "float32", repeats: int = 1, max_tokens: int = 10) -> Job:
    """The stage's job over `inputs`."""
    settings = {
        "task": {"max_tokens": max_tokens},
        "variant": {"drafter": "eagle3", "draft_steps": 2, "dtype": dtype},
        "task_name": "task",
        "variant_name": "chain2",
        "repeats": repeats,
        "concurrency": 1,
        "seed": 7,
    }
    return Job("benchmark", root / "benchmark/task/chain2/c1", inputs, settings, {"device": "cpu", "threads": 1}, root / "work")
