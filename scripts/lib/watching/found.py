"""Jobs at work below `results/`, from the `progress.json` in their work folders."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.ground.progress import NAME, clock

STOPPED = "stopped"
QUIET_SECONDS = 60.0  # without news, before the page says so


@dataclass(frozen=True)
class Found:
    """One job: the run that it belongs to, a label like `generate/chat`, and its figures with `condition` added."""

    run: str
    label: str
    figures: Mapping[str, Any]


def find(results: Path, run: str | None = None) -> list[Found]:
    """All jobs, or those of one `run`, by label. A file that goes or is replaced meanwhile belongs to a job that has just ended."""
    jobs = [job for path in sorted(results.glob(f"work/*/*/{NAME}")) if (job := read(path))]
    return sorted((job for job in jobs if run in (None, job.run)), key=lambda job: (job.run, job.label))


def read(path: Path) -> Found | None:
    """The job whose work folder holds `path`, None when it has just ended."""
    try:
        figures = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    stage, fingerprint = path.parts[-3:-1]
    parts = Path(figures["output"]).parts if figures["output"] else ()
    run, below = (parts[1], parts[3:-1]) if len(parts) > 3 else ("", (fingerprint,))  # results/<run>/<folder>/…/manifest.json
    return Found(run, "/".join([stage, *below]), figures | {"condition": condition(figures)})


def condition(figures: Mapping[str, Any]) -> str:
    """Whether the job runs, has been quiet for long, or was stopped."""
    if not alive(figures["pid"]):
        return STOPPED
    quiet = time.time() - figures["updated_at"]
    return f"no news for {clock(quiet)}" if quiet > QUIET_SECONDS else "running"


def alive(pid: int) -> bool:
    """Whether process `pid` runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
