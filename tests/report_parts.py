"""A finished run as the report finds it: manifests, cost files, cells and a training curve, without any real work."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job
from scripts.lib.reporting.published import STAGES

COST = {"seconds": 2.0, "resumed": False, "peak_memory_bytes": 3 * 2**30}
CURVE = (
    "step,epoch,loss,loss_0,eval_loss,eval_accept_length,eval_accept_length_loops,eval_accept_length_all,eval_accuracy_0,eval_accuracy_1\n"
    "1,1,9.5,9.5,,,,,,\n2,1,8.0,8.0,8.1,1.20,1.50,1.25,0.20,0.10\n3,2,7.5,7.5,,,,,,\n4,2,7.0,7.0,7.2,1.40,,1.40,0.35,0.20\n"
)


def cell(task: str, variant: str, **changes: Any) -> dict[str, Any]:
    """The content of a `cell.json`."""
    return {
        "task": task,
        "variant": variant,
        "drafter": "eagle3",
        "dtype": "float32",
        "concurrency": 1,
        "baseline_tok_s": 20.0,
        "tok_s": 15.0,
        "speedup": 0.75,
        "accept_length": 1.5,
        "ceiling": 5,
        "break_even_accept_length": 2.0,
        "identical": 12,
        "near_tie": 0,
        "different": 0,
        "prompts": 12,
        "completion_tokens": 600,
        "notes": [],
        "machine": {"cpu": "Some CPU", "device": "cpu", "gpu": None, "threads": 2},
        "versions": {"torch": "2.13.0"},
    } | changes


def publish(
    folder: Path,
    stage: str,
    counts: Counts,
    *,
    files: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
    cost: Mapping[str, Any] | None = None,
) -> Path:
    """A published folder with the text `files` in it."""
    folder.mkdir(parents=True)
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    shards = [Shard.of(folder / name, counts.rows_out, 10 * counts.rows_out) for name in sorted(files or {})]
    (folder / "cost.json").write_text(json.dumps(COST | dict(cost or {})))
    Manifest(stage, {}, {}, counts, shards, facts or {}).write(folder)
    return folder / "manifest.json"


def publish_cell(root: Path, content: Mapping[str, Any]) -> Path:
    """A benchmark cell."""
    files = {"cell.json": json.dumps(content), "outputs.parquet": "x"}
    prompts = content["prompts"]
    folder = root / "benchmark" / content["task"] / content["variant"] / f"c{content['concurrency']}"
    return publish(folder, "benchmark", Counts(prompts, prompts), files=files)


def prepared(kind: str) -> dict[str, str]:
    """The facts of a prepared dataset that the report shows."""
    return {"kind": kind, "partition": "short", "licence": "MIT"}


def publish_run(root: Path, cells: Sequence[Mapping[str, Any]], curve: str = CURVE) -> Job:
    """A run of two datasets, of which `chats` is native and has lost rows in every stage; the job that reports it."""
    mixed = {
        "chats": {"rows": 90, "tokens": 9000, "trained_tokens": 4000, "share": 0.8, "eval_rows": 5},
        "prompts": {"rows": 50, "tokens": 5000, "trained_tokens": 1000, "share": 0.2, "eval_rows": 3},
    }
    source = {"source": "wheel:some==1", "licence": "MIT"}
    paths = {
        "target": [publish(root / "target", "target", Counts(2, 2))],
        "raw": [publish(root / "raw" / name, "fetch", Counts(1, 1), facts=source) for name in mixed],
        "prepared": [
            publish(root / "prepared/chats", "prepare", Counts(1000, 100, {"not_sampled": 880, "too_long": 20}), facts=prepared("native")),
            publish(root / "prepared/prompts", "prepare", Counts(60, 60), facts=prepared("prompts")),
        ],
        "responses": [publish(root / "responses/prompts", "generate", Counts(60, 55, {"empty": 5}), cost={"resumed": True})],
        "tokens": [
            publish(root / "tokens/chats", "encode", Counts(180, 170, {"no_trained_position": 10}), facts={"rows": 95}),
            publish(root / "tokens/prompts", "encode", Counts(55, 55), facts={"rows": 55}),
        ],
        "merged": [publish(root / "merged", "merge", Counts(150, 140, {"duplicate": 10}), facts={"datasets": mixed})],
        "vocab": [publish(root / "vocab", "vocab", Counts(140, 140))],
        "hidden": [publish(root / "hidden", "hidden", Counts(140, 140), files={"train-00000.safetensors": "abcd"})],
        "drafters": [
            publish(root / "drafters/eagle3", "train", Counts(140, 140), files={"curves.csv": curve}, cost={"trained_tokens": 8000}),
        ],
        "cells": [publish_cell(root, content) for content in cells],
    }
    assert set(paths) == set(STAGES)
    return Job("report", root / "report", paths, {"run": "toy"}, work=root / "work")
