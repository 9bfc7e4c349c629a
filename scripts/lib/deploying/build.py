"""Stage `deploy`: the folder that goes to whoever serves the drafter."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.lib.deploying.card import card
from scripts.lib.deploying.choosing import Choice, best_choice
from scripts.lib.deploying.serving import TRAINING, check_script, measured_flags, serve_script
from scripts.lib.ground.files import write_json, write_text
from scripts.lib.ground.manifest import Counts, Manifest, Shard, checked_shard
from scripts.lib.ground.stage import Job, Result
from scripts.lib.reporting.cells import read_cells
from scripts.lib.reporting.published import Run

TARGET = "../target"  # from the published folder
COPIED = {"config.json": "config.json", "training.json": "training.json", "manifest.json": TRAINING}  # a link would share its time


def deploy(job: Job, folder: Path) -> Result:
    """Write the fastest drafter's files, `serve.sh`, `check.sh`, `served.json` and `README.md` into `folder`. Rows are drafters."""
    run = Run.read(job)
    cells = read_cells(run.parts["cells"])
    names = [part.name for part in run.parts["drafters"]]
    chosen = best_choice(cells, names)
    drafter = run.find("drafters", chosen.cell["drafter"])
    assert drafter is not None  # best_choice looks among these names
    for shard in drafter.manifest.shards:
        if shard.name == "model.safetensors":
            checked_shard(drafter.folder, shard)
    link(drafter.folder / "model.safetensors", folder / "model.safetensors")
    for name, own in COPIED.items():
        shutil.copyfile(drafter.folder / name, folder / own)
    pages = {"README.md": card(run, drafter, cells, chosen), "serve.sh": serve_script(chosen, TARGET), "check.sh": check_script()}
    for name, text in pages.items():
        write_text(folder / name, text)
    for name in ("serve.sh", "check.sh"):
        (folder / name).chmod(0o755)
    write_json(folder / "served.json", served(chosen))
    shards = [Shard.of(path, 0) for path in sorted(folder.iterdir()) if path.is_file()]
    others = len(names) - 1
    counts = Counts(len(names), 1, {"slower": others} if others else {})
    return Result(Manifest(job.stage, job.settings, job.input_digests(), counts, shards, served(chosen)))


def link(source: Path, destination: Path) -> None:
    """`source` at `destination` without a second copy of its bytes where the file system allows; an earlier attempt's is replaced."""
    destination.unlink(missing_ok=True)
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def served(chosen: Choice) -> Mapping[str, Any]:
    """What a server of this drafter should say of itself."""
    cell = chosen.cell
    named = {"drafter": cell["drafter"], "variant": cell["variant"], "concurrency": cell["concurrency"], "pays": chosen.pays}
    return named | {"algorithm": "EAGLE3", "ceiling": cell["ceiling"], "target": TARGET, "flags": measured_flags(cell)}
